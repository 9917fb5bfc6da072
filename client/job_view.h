// Jobs and nodes as text for humans and scripts. Pure functions but for what they write to
// `output`.

#pragma once

#include <string>
#include <vector>

#include "client/output.h"
#include "oom/v1/job.pb.h"
#include "oom/v1/node.pb.h"

namespace oom {

// "RUNNING".
std::string StateName(v1::JobState state);
// The state of a name such as "running"; JOB_STATE_UNSPECIFIED when there is none. `closest` may be
// null.
v1::JobState ParseState(const std::string& name, std::string* closest);

// Every form: a table, a JSON list, one job a line, YAML job files, names.
void WriteJobs(const std::vector<v1::Job>& jobs, double now_seconds, Output* output);
// The same for one job; its JSON is the object itself.
void WriteJob(const v1::Job& job, double now_seconds, Output* output);
// Everything, with a sentence on why it waits.
void WriteDescription(const v1::Job& job, double now_seconds, Output* output);
// "why it waits" in one line, or "".
std::string WhyItWaits(const v1::Job& job);

// One line of `oom watch`.
void WriteEvent(const v1::JobEvent& event, Output* output);

void WriteNode(const v1::Node& node, Output* output);

}  // namespace oom
