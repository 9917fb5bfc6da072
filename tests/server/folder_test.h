// A fixture with a temporary folder of its own, removed behind each test.

#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace oom::testing {

class FolderTest : public ::testing::Test {
 protected:
  FolderTest() {
    char name[] = "/tmp/oom-server-XXXXXX";
    folder_ = mkdtemp(name);
  }
  ~FolderTest() override { std::filesystem::remove_all(folder_); }
  void Write(const std::string& name, const std::string& text) {
    std::filesystem::create_directories(std::filesystem::path(folder_ + "/" + name).parent_path());
    std::ofstream(folder_ + "/" + name, std::ios::binary) << text;
  }
  void Append(const std::string& name, const std::string& text) {
    std::ofstream(folder_ + "/" + name, std::ios::binary | std::ios::app) << text;
  }
  std::string folder_;
};

}  // namespace oom::testing
