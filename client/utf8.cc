#include "client/utf8.h"

namespace oom {

size_t Utf8CharacterBytes(std::string_view text, uint32_t* value) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  if (byte(0) < 0x80) {
    *value = byte(0);
    return 1;
  }
  const size_t length = byte(0) >= 0xf0 ? 4 : byte(0) >= 0xe0 ? 3 : 2;
  if (byte(0) < 0xc2 || byte(0) > 0xf4 || text.size() < length) return 0;
  *value = byte(0) & (0xffu >> (length + 1));
  for (size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
    *value = (*value << 6) | (byte(i) & 0x3f);
  }
  const uint32_t least = length == 4 ? 0x10000 : length == 3 ? 0x800 : 0x80;
  if (*value < least || *value > 0x10ffff || (*value >= 0xd800 && *value < 0xe000)) return 0;
  return length;
}

bool IsUtf8(std::string_view text) {
  while (!text.empty()) {
    uint32_t value = 0;
    const size_t length = Utf8CharacterBytes(text, &value);
    if (length == 0) return false;
    text.remove_prefix(length);
  }
  return true;
}

}  // namespace oom
