// Any bytes as a stream of frames: however it is cut, the decoder yields the same payloads, none
// above the limit, and refuses the stream at the same place. The first byte steers the cuts.
// Payloads are parsed as each of the messages that travel this way.

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "oom/internal/v1/control.pb.h"
#include "runtime/base/check.h"
#include "runtime/ipc/frame.h"

namespace {

struct Decoded {
  std::vector<std::string> payloads;
  bool refused = false;
};

Decoded Decode(std::string_view stream, size_t part_bytes) {
  Decoded decoded;
  oom::FrameDecoder decoder;
  while (!stream.empty() && !decoded.refused) {
    const std::string_view part = stream.substr(0, part_bytes);
    stream.remove_prefix(part.size());
    decoded.refused = !decoder.Append(part).ok();
    while (auto payload = decoder.Next()) {
      OOM_CHECK(static_cast<int64_t>(payload->size()) <= oom::kFrameLimitBytes);
      decoded.payloads.push_back(std::move(*payload));
    }
  }
  return decoded;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string_view stream(reinterpret_cast<const char*>(data) + 1, size - 1);
  const Decoded whole = Decode(stream, stream.size() + 1);
  const Decoded cut = Decode(stream, 1 + data[0] % 16);
  OOM_CHECK(whole.payloads == cut.payloads && whole.refused == cut.refused);
  for (const std::string& payload : whole.payloads) {
    static_cast<void>(oom::internal::v1::DaemonFrame().ParseFromString(payload));
    static_cast<void>(oom::internal::v1::HostFrame().ParseFromString(payload));
    static_cast<void>(oom::internal::v1::WorkerFrame().ParseFromString(payload));
    static_cast<void>(oom::internal::v1::HostToWorkerFrame().ParseFromString(payload));
  }
  return 0;
}
