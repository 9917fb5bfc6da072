#include <gtest/gtest.h>

#include <functional>

#include "runtime/base/file.h"
#include "tests/proto/descriptor_compatibility.h"

namespace oom {
namespace {

using google::protobuf::DescriptorProto;
using google::protobuf::FieldDescriptorProto;
using google::protobuf::FileDescriptorProto;
using google::protobuf::FileDescriptorSet;

FileDescriptorSet Read(const std::string& path) {
  FileDescriptorSet set;
  const Result<std::string> bytes = ReadFile(path);
  EXPECT_TRUE(bytes.ok()) << bytes.status().ToString();
  EXPECT_TRUE(bytes.ok() && set.ParseFromString(*bytes)) << path;
  return set;
}

FileDescriptorSet Golden() { return Read(OOM_SOURCE_DIR "/tests/data/oom_v1.golden.binpb"); }

// The golden set after `change` to oom.v1's message `name`.
std::vector<std::string> After(const std::string& name,
                               const std::function<void(DescriptorProto&)>& change) {
  FileDescriptorSet set = Golden();
  bool found = false;
  for (FileDescriptorProto& file : *set.mutable_file()) {
    for (DescriptorProto& message : *file.mutable_message_type()) {
      if (message.name() != name) continue;
      found = true;
      change(message);
    }
  }
  EXPECT_TRUE(found) << name;
  return IncompatibleChanges(Golden(), set);
}

// A new field is added to the golden file by: cp <build>/proto/oom_v1.binpb
// tests/data/oom_v1.golden.binpb
TEST(GoldenDescriptorTest, TheApiKeepsEverythingThatItEverHad) {
  const FileDescriptorSet golden = Golden();
  const FileDescriptorSet current = Read(OOM_DESCRIPTOR_SET);
  EXPECT_GE(golden.file_size(), 4);
  for (const std::string& change : IncompatibleChanges(golden, current)) ADD_FAILURE() << change;
}

TEST(GoldenDescriptorTest, TheCheckSeesARemovedRenumberedRenamedOrRetypedField) {
  const auto removed =
      After("Job", [](DescriptorProto& job) { job.mutable_field()->DeleteSubrange(2, 1); });
  ASSERT_EQ(removed.size(), 1U);
  EXPECT_NE(removed[0].find("field oom.v1.Job number 3"), std::string::npos) << removed[0];
  EXPECT_NE(removed[0].find("is gone"), std::string::npos);
  EXPECT_EQ(After("Job", [](DescriptorProto& job) { job.mutable_field(0)->set_number(99); }).size(),
            1U);
  EXPECT_EQ(
      After("Job", [](DescriptorProto& job) { job.mutable_field(0)->set_name("title"); }).size(),
      1U);
  EXPECT_EQ(After("Job",
                  [](DescriptorProto& job) {
                    job.mutable_field(0)->set_type(FieldDescriptorProto::TYPE_BYTES);
                  })
                .size(),
            1U);
  EXPECT_EQ(After("Job",
                  [](DescriptorProto& job) {
                    job.mutable_field(0)->set_label(FieldDescriptorProto::LABEL_REPEATED);
                  })
                .size(),
            1U);
  EXPECT_GE(
      After("RetrySpec", [](DescriptorProto& message) { message.set_name("Retries"); }).size(), 2U);
}

TEST(GoldenDescriptorTest, TheCheckSeesRemovedEnumValuesAndMethods) {
  FileDescriptorSet set = Golden();
  int changed = 0;
  for (FileDescriptorProto& file : *set.mutable_file()) {
    if (file.name() != "oom/v1/job.proto") continue;
    file.mutable_service(0)->mutable_method()->RemoveLast();
    file.mutable_enum_type(0)->mutable_value()->RemoveLast();
    changed = 2;
  }
  EXPECT_EQ(IncompatibleChanges(Golden(), set).size(), static_cast<size_t>(changed));
  EXPECT_EQ(changed, 2);
}

TEST(GoldenDescriptorTest, AnAddedFieldIsFine) {
  EXPECT_TRUE(After("Job", [](DescriptorProto& job) {
                FieldDescriptorProto& field = *job.add_field();
                field.set_name("brand_new");
                field.set_number(1000);
                field.set_type(FieldDescriptorProto::TYPE_INT64);
                field.set_label(FieldDescriptorProto::LABEL_OPTIONAL);
              }).empty());
}

}  // namespace
}  // namespace oom
