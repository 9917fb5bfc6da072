# Where each dependency comes from. Every one sits behind few folders (docs/ARCHITECTURE.md).

find_package(Protobuf REQUIRED)  # Module mode: Debian's protobuf brings no CMake configuration.
find_package(gRPC CONFIG REQUIRED)
find_package(SQLite3 REQUIRED)
find_package(yaml-cpp REQUIRED)
find_package(CLI11 REQUIRED)
find_package(prometheus-cpp CONFIG REQUIRED)
find_package(Boost CONFIG REQUIRED)
find_path(OOM_NUMA_INCLUDE numa.h REQUIRED)
find_library(OOM_NUMA_LIBRARY numa REQUIRED)
add_library(oom_numa_import INTERFACE)
target_link_libraries(oom_numa_import INTERFACE ${OOM_NUMA_LIBRARY})

if(OOM_TESTS)
  find_package(GTest REQUIRED)
endif()
if(OOM_LIBTORCH)
  find_package(LibTorch REQUIRED)
endif()
if(OOM_CUDA)
  find_package(CUDAToolkit REQUIRED)
endif()
