#include "runtime/trace/chrome_trace.h"

#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <set>

namespace oom {
namespace {

using Json = nlohmann::json;

TraceEvent Event(const std::string& process, const std::string& row, double start, double duration,
                 int64_t bytes = -1) {
  return {.name = "event",
          .process = process,
          .row = row,
          .start_microseconds = start,
          .duration_microseconds = duration,
          .bytes = bytes};
}

TEST(ChromeTraceTest, PartsMergeIntoOneRowAResource) {
  ChromeTrace host, first, second;
  host.AddProcess("job host");
  host.AddProcess("rank 0");
  host.AddRow("rank 0", "compute");
  first.Add(Event("rank 0", "H2D", 1, 2, 77));
  first.Add(Event("rank 0", "compute", 3, 1));
  second.Add(Event("rank 1", "compute", 2, 2));
  second.Add(Event("rank 0", "compute", 5, 1));
  host.Merge(first);
  host.Merge(second);
  const Json json = Json::parse(host.ToJson());
  std::map<std::pair<int, int>, std::string> rows;
  std::map<int, std::string> processes;
  for (const Json& event : json["traceEvents"]) {
    if (event["name"] == "process_name") processes[event["pid"]] = event["args"]["name"];
    if (event["name"] == "thread_name") rows[{event["pid"], event["tid"]}] = event["args"]["name"];
  }
  EXPECT_EQ(processes.size(), 3u);
  EXPECT_EQ(processes[1], "job host");  // The order of the calls, from the top.
  EXPECT_EQ(processes[2], "rank 0");
  std::multiset<std::string> places;
  for (const Json& event : json["traceEvents"]) {
    if (event["ph"] != "X") continue;
    places.insert(processes[event["pid"]] + "/" + rows[{event["pid"], event["tid"]}]);
  }
  EXPECT_EQ(places, (std::multiset<std::string>{"rank 0/H2D", "rank 0/compute", "rank 0/compute",
                                                "rank 1/compute"}));
}

// Goal: within a row of the file, events follow each other or nest, whatever was added, and none is
// lost. Method: random intervals on a few rows; each pair of a row is checked.
TEST(ChromeTraceTest, EventsOfARowNeverOverlapInPart) {
  std::mt19937 random(11);
  ChromeTrace trace;
  for (int i = 0; i < 300; ++i) {
    trace.Add(Event("p", "row " + std::to_string(random() % 3), random() % 1000, random() % 50));
  }
  const Json json = Json::parse(trace.ToJson());
  std::map<int, std::vector<std::pair<double, double>>> rows;
  size_t count = 0;
  for (const Json& event : json["traceEvents"]) {
    if (event["ph"] != "X") continue;
    ++count;
    rows[event["tid"]].push_back(
        {event["ts"].get<double>(), event["ts"].get<double>() + event["dur"].get<double>()});
  }
  EXPECT_EQ(count, 300u);
  for (const auto& [tid, intervals] : rows) {
    for (size_t a = 0; a < intervals.size(); ++a) {
      for (size_t b = a + 1; b < intervals.size(); ++b) {
        const auto& [a0, a1] = intervals[a];
        const auto& [b0, b1] = intervals[b];
        const bool apart = a1 <= b0 || b1 <= a0;
        const bool nested = (a0 <= b0 && b1 <= a1) || (b0 <= a0 && a1 <= b1);
        EXPECT_TRUE(apart || nested) << a0 << " " << a1 << " " << b0 << " " << b1;
      }
    }
  }
}

TEST(ChromeTraceTest, ReadsBackWhatItWrote) {
  ChromeTrace trace;
  trace.Add(Event("rank 0", "compute", 1.0 / 3, 2e9 + 0.125, 0));
  trace.Add({.name = "quote \" backslash \\ control \n utf8 \xC3\xA9 broken \xFF",
             .process = "p\"",
             .row = "r\n",
             .start_microseconds = -1,
             .duration_microseconds = 0});
  const auto read = ChromeTrace::FromJson(trace.ToJson(), "t");
  ASSERT_TRUE(read.ok()) << read.status().ToString();
  ASSERT_EQ(read->events().size(), 2u);
  EXPECT_EQ(read->events()[0].start_microseconds, 1.0 / 3);
  EXPECT_EQ(read->events()[0].duration_microseconds, 2e9 + 0.125);
  EXPECT_EQ(read->events()[0].bytes, 0);
  EXPECT_EQ(read->events()[1].process, "p\"");
  EXPECT_EQ(read->events()[1].bytes, -1);
  EXPECT_EQ(read->ToJson(), trace.ToJson());
}

TEST(ChromeTraceTest, CurvesAreOfTheirProcess) {
  ChromeTrace host, rank;
  host.Add(Event("job host", "optimizer", 1, 2));
  rank.Add(Event("rank 0", "compute", 3, 1));
  rank.AddCounter({.name = "device memory", .process = "rank 0", .time_microseconds = 3, .bytes = int64_t{5} << 33});
  rank.AddCounter({.name = "device memory", .process = "rank 0", .time_microseconds = 4.25, .bytes = 0});
  const auto read = ChromeTrace::FromJson(rank.ToJson(), "t");
  ASSERT_TRUE(read.ok()) << read.status().ToString();
  host.Merge(*read);
  ASSERT_EQ(host.counters().size(), 2u);
  EXPECT_EQ(host.counters()[0].bytes, int64_t{5} << 33);
  EXPECT_EQ(host.counters()[1].time_microseconds, 4.25);
  const Json json = Json::parse(host.ToJson());
  int points = 0;
  for (const Json& event : json["traceEvents"]) {
    if (event["ph"] != "C") continue;
    ++points;
    EXPECT_EQ(event["pid"], 2);  // "rank 0" stands below the job host.
    EXPECT_EQ(event["name"], "device memory");
  }
  EXPECT_EQ(points, 2);
}

TEST(ChromeTraceTest, AnEmptyTraceIsValid) {
  const auto read = ChromeTrace::FromJson(ChromeTrace().ToJson(), "t");
  ASSERT_TRUE(read.ok());
  EXPECT_TRUE(read->events().empty());
}

TEST(ChromeTraceTest, OtherTextIsRefused) {
  for (const char* text :
       {"", "[]", "{}", "{\"traceEvents\": 1}", "{\"traceEvents\": [1]}",
        "{\"traceEvents\": [{\"ph\": \"X\", \"name\": \"a\", \"pid\": 1, \"tid\": 1}]}",
        "{\"traceEvents\": [{\"ph\": \"X\", \"name\": \"a\", \"pid\": 1, \"tid\": 1, "
        "\"ts\": 1, \"dur\": 1}]}",
        "{\"traceEvents\": [{\"ph\": \"C\", \"name\": \"a\", \"pid\": 1, \"tid\": 0, "
        "\"ts\": 1, \"args\": {\"bytes\": 1}}]}",
        "{\"traceEvents\": [{\"ph\": \"M\", \"name\": \"thread_name\", \"pid\": 1, "
        "\"tid\": 1, \"args\": {\"name\": 5}}]}"}) {
    const auto read = ChromeTrace::FromJson(text, "file.json");
    ASSERT_FALSE(read.ok()) << text;
    EXPECT_EQ(read.status().code(), Code::kInvalidArgument);
    EXPECT_NE(read.status().message().find("file.json"), std::string::npos);
  }
}

}  // namespace
}  // namespace oom
