// The checkpoint manifest: any bytes are refused or give a manifest that writes and reads back the
// same. The input is tried as it is, and as a body to which the checksum that fits is added, so
// that what is behind the checksum is reached too.

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <span>
#include <string>
#include <string_view>

#include "runtime/base/check.h"
#include "runtime/checkpoint/crc32c.h"
#include "runtime/checkpoint/manifest.h"
#include "runtime/model/unit.h"

namespace {

void TryText(std::string_view text) {
  const oom::Result<oom::Manifest> parsed = oom::ParseManifest(text, "fuzz");
  if (!parsed.ok()) {
    OOM_CHECK(parsed.status().code() == oom::Code::kDataLoss);
    return;
  }
  const std::string written = oom::FormatManifest(*parsed);
  const oom::Result<oom::Manifest> again = oom::ParseManifest(written, "fuzz");
  OOM_CHECK(again.ok());
  OOM_CHECK(oom::FormatManifest(*again) == written);
  // What is accepted can be laid out without overflow.
  OOM_CHECK(oom::ParameterCount(oom::BuildUnits(parsed->model, 1)) > 0);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  TryText(input);
  char tail[48];
  std::snprintf(tail, sizeof(tail), ",\n \"checksum\": \"%08x\"}\n",
                oom::Crc32c(std::as_bytes(std::span(input.data(), input.size()))));
  TryText(std::string(input) + tail);
  return 0;
}
