"""Writes dashboards/oomd.json, the Grafana dashboard of one daemon and its jobs: make_dashboard.py > oomd.json."""

import json

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}

# title, what it answers, unit, [(PromQL, legend)]
PANELS = [
    ("Loss", "Training loss of each job's last step.", "none",
     [('oomd_job_loss{job=~"$job", instance=~"$instance"}', "{{job}}")]),
    ("Tokens a second", "Tokens that each job trains on.", "none",
     [('rate(oomd_job_tokens_total{job=~"$job", instance=~"$instance"}[$__rate_interval])', "{{job}}")]),
    ("Steps: completed and durable", "How far each job is, and what a crash could not take away.", "none",
     [('oomd_job_step{job=~"$job", instance=~"$instance"}', "{{job}}"),
      ('oomd_job_durable_step{job=~"$job", instance=~"$instance"}', "{{job}} durable")]),
    ("Step time, 90th percentile", "Time of a training step.", "s",
     [('histogram_quantile(0.9, sum by (le, job) (rate(oomd_job_step_duration_seconds_bucket{job=~"$job", '
       'instance=~"$instance"}[$__rate_interval])))', "{{job}}")]),
    ("Since the last step", "A job that stands still climbs here.", "s",
     [('time() - oomd_job_last_progress_timestamp_seconds{job=~"$job", instance=~"$instance"}', "{{job}}")]),
    ("Transfers", "Bytes between host and devices.", "Bps",
     [('sum by (direction) (rate(oomd_transfer_bytes_total{instance=~"$instance"}[$__rate_interval]))', "{{direction}}")]),
    ("Waiting devices", "Share of time in which devices wait for transfers or updates.", "percentunit",
     [('rate(oomd_transfer_stall_seconds_total{instance=~"$instance"}[$__rate_interval])', "stall")]),
    ("Optimizer threads", "Busy seconds a second of the host optimizer.", "none",
     [('rate(oomd_optimizer_busy_seconds_total{instance=~"$instance"}[$__rate_interval])', "{{numa_node}}")]),
    ("Host memory for jobs", "What jobs hold, and what they may.", "bytes",
     [('oomd_pool_used_bytes{instance=~"$instance"}', "used, node {{numa_node}}"),
      ('oomd_pool_capacity_bytes{instance=~"$instance"}', "capacity, node {{numa_node}}")]),
    ("Jobs by state", "The queue and what runs.", "none",
     [('oomd_jobs{instance=~"$instance"}', "{{state}}")]),
    ("Attempts made again", "Failures that were retried, by reason.", "none",
     [('sum by (reason) (increase(oomd_worker_restarts_total{instance=~"$instance"}[$__rate_interval]))', "{{reason}}")]),
    ("Durable commits, 99th percentile", "Time that the job store needs to make a change durable.", "s",
     [('histogram_quantile(0.99, sum by (le) (rate(oomd_store_commit_duration_seconds_bucket{instance=~"$instance"}'
       "[$__rate_interval])))", "commit")]),
]


def variable(name, label, query):
    return {"name": name, "label": label, "type": "query", "datasource": DATASOURCE, "query": query, "refresh": 2,
            "multi": True, "includeAll": True, "allValue": ".+", "current": {"text": "All", "value": "$__all"}}


def panel(index, title, description, unit, targets):
    return {
        "id": index + 1,
        "type": "timeseries",
        "title": title,
        "description": description,
        "datasource": DATASOURCE,
        "gridPos": {"h": 8, "w": 12, "x": 12 * (index % 2), "y": 8 * (index // 2)},
        "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
        "targets": [{"refId": chr(ord("A") + i), "datasource": DATASOURCE, "expr": expression, "legendFormat": legend}
                    for i, (expression, legend) in enumerate(targets)],
    }


def dashboard():
    return {
        "uid": "oomd", "id": None, "title": "OOM", "editable": False, "schemaVersion": 39, "tags": ["oom"],
        "refresh": "10s", "timezone": "browser", "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [
            {"name": "datasource", "label": "Data Source", "type": "datasource", "query": "prometheus"},
            variable("instance", "Instance", "label_values(oomd_build_info, instance)"),
            variable("job", "Job", "label_values(oomd_job_step, job)"),
        ]},
        "panels": [panel(i, *description) for i, description in enumerate(PANELS)],
    }


if __name__ == "__main__":
    print(json.dumps(dashboard(), indent=1))
