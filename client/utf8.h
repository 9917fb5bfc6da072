// UTF-8, strictly. Pure functions.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace oom {

// The bytes of the character at the start of `text`, and the character; 0 when it is broken: cut,
// overlong, a surrogate, above U+10FFFF. REQUIRES: !text.empty().
size_t Utf8CharacterBytes(std::string_view text, uint32_t* value);

bool IsUtf8(std::string_view text);

}  // namespace oom
