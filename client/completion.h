// Completion scripts for shells, made from the table of commands. Job names come from
// `oom ls -o name --timeout 300ms`, so that a slow daemon never holds up the prompt. Pure function.

#pragma once

#include <string>
#include <string_view>

namespace oom {

// `shell` is "bash", "zsh" or "fish".
std::string CompletionScript(std::string_view shell);

}  // namespace oom
