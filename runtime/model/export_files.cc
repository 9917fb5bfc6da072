#include "runtime/model/export_files.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <map>
#include <thread>
#include <utility>

#include "runtime/base/mutex.h"

namespace oom {
namespace {

constexpr int64_t kPieceElements = int64_t{1} << 20;

std::string ShardName(size_t index, size_t count) {
  if (count == 1) return kSingleFileName;
  char name[64];
  std::snprintf(name, sizeof(name), "model-%05zu-of-%05zu.safetensors", index + 1, count);
  return name;
}

// Buffers of one writing thread.
struct Buffers {
  std::vector<float> values = std::vector<float>(kPieceElements);
  std::vector<std::byte> bytes = std::vector<std::byte>(kPieceElements * 4);
};

Status WriteTrained(const StateSource& state, StateArray array, const ExportTensor& tensor,
                    Buffers& buffers, SafetensorsWriter& writer) {
  const FileTensor& source = *tensor.source;
  const int64_t element_bytes = TensorTypeBytes(tensor.entry.type);
  for (int64_t done = 0; done < source.elements;) {
    const int64_t count = std::min(kPieceElements, source.elements - done);
    const std::span<float> values(buffers.values.data(), static_cast<size_t>(count));
    const std::span<std::byte> bytes(buffers.bytes.data(),
                                     static_cast<size_t>(count * element_bytes));
    OOM_RETURN_IF_ERROR(
        state.Read(source.unit, source.tensor, array, source.offset_elements + done, values));
    const int64_t overflow = ConvertFromFloat(tensor.entry.type, values, bytes);
    if (overflow >= 0) {
      return Status(Code::kInvalidArgument,
                    "tensor \"" + tensor.entry.name + "\": element " +
                        std::to_string(done + overflow) + " is " +
                        std::to_string(values[static_cast<size_t>(overflow)]) +
                        ", beyond the range of F16; export as BF16 or F32");
    }
    OOM_RETURN_IF_ERROR(writer.Append(bytes));
    done += count;
  }
  return Status::Ok();
}

Status WriteCopied(const ExportTensor& tensor, Buffers& buffers, SafetensorsWriter& writer) {
  const SafetensorInfo& info = *tensor.copied.info;
  const int64_t piece_bytes = static_cast<int64_t>(buffers.bytes.size());
  for (int64_t done = 0; done < info.bytes;) {
    const std::span<std::byte> bytes(buffers.bytes.data(),
                                     static_cast<size_t>(std::min(piece_bytes, info.bytes - done)));
    OOM_RETURN_IF_ERROR(tensor.copied.file->Read(info, done, bytes));
    OOM_RETURN_IF_ERROR(writer.Append(bytes));
    done += static_cast<int64_t>(bytes.size());
  }
  return Status::Ok();
}

Result<std::unique_ptr<SafetensorsWriter>> CreateWriter(const ExportFile& file,
                                                        const std::string& path) {
  if (file.like != nullptr) return SafetensorsWriter::CreateLike(path, *file.like);
  SafetensorsWriter::Options options;
  options.path = path;
  options.metadata = {{"format", "pt"}};
  for (const ExportTensor& tensor : file.tensors) options.tensors.push_back(tensor.entry);
  return SafetensorsWriter::Create(options);
}

Status WriteFile(const StateSource& state, StateArray array, const ExportFile& file,
                 const std::string& directory, Buffers& buffers) {
  OOM_ASSIGN_OR_RETURN(auto writer, CreateWriter(file, directory + "/" + file.name));
  for (const ExportTensor& tensor : file.tensors) {
    if (tensor.source != nullptr) {
      OOM_RETURN_IF_ERROR(WriteTrained(state, array, tensor, buffers, *writer));
    } else {
      OOM_RETURN_IF_ERROR(WriteCopied(tensor, buffers, *writer));
    }
  }
  return writer->Finish();
}

}  // namespace

int64_t ExportFile::bytes() const {
  int64_t total = 0;
  for (const ExportTensor& tensor : tensors) {
    int64_t bytes = TensorTypeBytes(tensor.entry.type);
    for (const int64_t dimension : tensor.entry.shape) bytes *= dimension;
    total += bytes;
  }
  return total;
}

std::vector<ExportFile> CutIntoShards(const std::vector<FileTensor>& published, TensorType type,
                                      int64_t shard_bytes) {
  std::vector<ExportFile> files(1);
  int64_t bytes = 0;
  for (const FileTensor& tensor : published) {
    const int64_t tensor_bytes = tensor.elements * TensorTypeBytes(type);
    if (bytes > 0 && bytes + tensor_bytes > shard_bytes) {
      files.emplace_back();
      bytes = 0;
    }
    bytes += tensor_bytes;
    files.back().tensors.push_back({{tensor.name, type, tensor.shape}, &tensor, {}});
  }
  for (size_t i = 0; i < files.size(); ++i) files[i].name = ShardName(i, files.size());
  return files;
}

Status WriteExportFiles(const StateSource& state, StateArray array,
                        const std::vector<ExportFile>& files, const std::string& directory,
                        int thread_count) {
  std::atomic<size_t> next{0};
  std::atomic<bool> failed{false};
  Mutex mutex;
  Status first_failure;
  const auto work = [&] {
    Buffers buffers;
    while (!failed) {
      const size_t index = next++;
      if (index >= files.size()) return;
      Status status = WriteFile(state, array, files[index], directory, buffers);
      if (status.ok()) continue;
      MutexLock lock(mutex);
      if (!failed) first_failure = std::move(status);
      failed = true;
    }
  };
  const size_t count = std::min(static_cast<size_t>(std::max(thread_count, 1)), files.size());
  std::vector<std::thread> threads;
  for (size_t i = 1; i < count; ++i) threads.emplace_back(work);
  work();
  for (std::thread& thread : threads) thread.join();
  return first_failure;
}

Status WriteExportIndex(const std::vector<ExportFile>& files, const std::string& directory) {
  if (files.size() == 1 && files[0].name == kSingleFileName) return Status::Ok();
  std::map<std::string, std::string> file_by_tensor;
  int64_t bytes = 0;
  int64_t parameters = 0;
  for (const ExportFile& file : files) {
    bytes += file.bytes();
    for (const ExportTensor& tensor : file.tensors) {
      file_by_tensor[tensor.entry.name] = file.name;
      if (tensor.source != nullptr) parameters += tensor.source->elements;
    }
  }
  return WriteSafetensorsIndex(directory + "/" + kIndexFileName, file_by_tensor, bytes, parameters);
}

}  // namespace oom
