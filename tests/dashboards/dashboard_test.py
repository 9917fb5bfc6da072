"""The dashboard shows only metrics that oomd exports, in the form that Grafana provisioning wants."""

import json
import pathlib
import re
import subprocess
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
DASHBOARD = ROOT / "dashboards" / "oomd.json"


def exported_metrics():
    """Names that the daemon registers; a histogram exports _bucket, _sum and _count."""
    names = set(re.findall(r'"(oomd_[a-z_]+)"', (ROOT / "server/oomd/metrics.cc").read_text(encoding="utf-8")))
    return names | {name + suffix for name in names for suffix in ("_bucket", "_sum", "_count")}


class DashboardTest(unittest.TestCase):
    def setUp(self):
        self.dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))

    def expressions(self):
        return [target["expr"] for panel in self.dashboard["panels"] for target in panel["targets"]]

    def test_file_is_what_the_generator_writes(self):
        written = subprocess.run([sys.executable, "-B", ROOT / "dashboards/make_dashboard.py"], capture_output=True,
                                 text=True, check=True).stdout
        self.assertEqual(json.loads(written), self.dashboard)

    def test_every_metric_exists(self):
        exported = exported_metrics()
        self.assertGreater(len(exported), 20)
        for expression in self.expressions():
            used = re.findall(r"oomd_[a-z_]+", expression)
            self.assertTrue(used, expression)
            self.assertEqual(set(used) - exported, set(), expression)

    def test_every_metric_is_documented(self):
        documented = (ROOT / "docs/METRICS.md").read_text(encoding="utf-8")
        registered = set(re.findall(r'"(oomd_[a-z_]+)"', (ROOT / "server/oomd/metrics.cc").read_text(encoding="utf-8")))
        self.assertEqual({name for name in registered if f"`{name}`" not in documented}, set())

    def test_panels_say_what_they_show_and_filter_by_instance(self):
        for panel in self.dashboard["panels"]:
            self.assertTrue(panel["title"] and panel["description"].endswith("."))
            self.assertIn(panel["fieldConfig"]["defaults"]["unit"], ("bytes", "s", "percentunit", "Bps", "ops", "none"))
            self.assertEqual(panel["datasource"]["uid"], "${datasource}")
            self.assertEqual(panel["type"], "timeseries")
        for expression in self.expressions():
            self.assertIn('instance=~"$instance"', expression)

    def test_counters_are_read_as_rates(self):
        for expression in self.expressions():
            for counter in re.findall(r"oomd_[a-z_]+_total", expression):
                self.assertRegex(expression, r"(rate|increase)\(" + counter)
                self.assertIn("$__rate_interval", expression)


if __name__ == "__main__":
    unittest.main()
