# What every target shares: compiler cache, linker, warnings, and the three functions that declare
# libraries, programs and tests. A folder's CMakeLists.txt is its list of sources and dependencies.

find_program(OOM_CCACHE ccache)
if(OOM_CCACHE)
  # Paths below the source folder count as relative: another clone of the same sources finds the objects.
  set(CMAKE_CXX_COMPILER_LAUNCHER
      ${CMAKE_COMMAND} -E env CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime
      CCACHE_BASEDIR=${PROJECT_SOURCE_DIR} CCACHE_NOHASHDIR=1
      ${OOM_CCACHE})
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${OOM_CCACHE})
endif()

foreach(linker mold lld)
  find_program(OOM_LD_${linker} ld.${linker})
  if(OOM_LD_${linker})
    add_link_options($<HOST_LINK:-fuse-ld=${linker}>)
    break()
  endif()
endforeach()

add_library(oom_options INTERFACE)
target_compile_options(oom_options INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wno-missing-field-initializers -ffp-contract=off>
  # A user's compiler may warn where ours does not.
  $<$<BOOL:${OOM_WERROR}>:$<$<COMPILE_LANGUAGE:CXX>:-Werror>>
  $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CXX_COMPILER_ID:GNU>>:-fpch-preprocess -Wno-maybe-uninitialized -Wno-restrict>
  $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CXX_COMPILER_ID:Clang>>:-Wthread-safety>)

# oom_library(name HEADERS h... SOURCES cc... DEPS target...): one folder, one library, one list.
function(oom_library name)
  cmake_parse_arguments(arg "" "" "HEADERS;SOURCES;DEPS" ${ARGN})
  if(arg_SOURCES)
    add_library(${name} STATIC ${arg_SOURCES})
    target_sources(${name} PUBLIC FILE_SET HEADERS BASE_DIRS ${PROJECT_SOURCE_DIR} FILES ${arg_HEADERS})
    target_link_libraries(${name} PUBLIC ${arg_DEPS} PRIVATE oom_options)
  else()
    add_library(${name} INTERFACE)
    target_sources(${name} INTERFACE FILE_SET HEADERS BASE_DIRS ${PROJECT_SOURCE_DIR} FILES ${arg_HEADERS})
    target_link_libraries(${name} INTERFACE ${arg_DEPS})
  endif()
  set_target_properties(${name} PROPERTIES VERIFY_INTERFACE_HEADER_SETS ON)
endfunction()

# oom_kernels(name HEADERS h... SOURCES cu... ARCHITECTURES a...): CUDA kernels on raw pointers. Later GPUs compile the text
# of the last architecture, so no other's is carried; code is packed tight, for the package has a size to keep.
function(oom_kernels name)
  cmake_parse_arguments(arg "" "" "HEADERS;SOURCES;ARCHITECTURES" ${ARGN})
  add_library(${name} STATIC ${arg_SOURCES})
  target_sources(${name} PUBLIC FILE_SET HEADERS BASE_DIRS ${PROJECT_SOURCE_DIR} FILES ${arg_HEADERS})
  target_include_directories(${name} PUBLIC ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
  target_compile_options(${name} PRIVATE
    $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra --expt-relaxed-constexpr --compress-mode=size>
    $<$<AND:$<COMPILE_LANGUAGE:CUDA>,$<BOOL:${OOM_WERROR}>>:-Werror=all-warnings>)
  list(POP_BACK arg_ARCHITECTURES newest)
  list(TRANSFORM arg_ARCHITECTURES APPEND "-real")
  set_target_properties(${name} PROPERTIES CUDA_ARCHITECTURES "${arg_ARCHITECTURES};${newest}")
endfunction()

# oom_gpu_test(name SOURCES file... DEPS target...): a GoogleTest program that skips itself where there is no GPU.
# It may call LibTorch's CUDA operators as a reference.
function(oom_gpu_test name)
  oom_test(${name} ${ARGN})
  target_link_libraries(${name} PRIVATE oom_needs_gpu LibTorch::cuda)
  set_tests_properties(${name} PROPERTIES SKIP_RETURN_CODE 77)
endfunction()

# oom_program(name SOURCES cc... DEPS target...): one executable.
function(oom_program name)
  cmake_parse_arguments(arg "" "" "SOURCES;DEPS" ${ARGN})
  add_executable(${name} ${arg_SOURCES})
  target_link_libraries(${name} PRIVATE ${arg_DEPS} oom_options)
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/bin)
endfunction()

# oom_test(name SOURCES cc... DEPS target... LABELS label... SHARDS n TIMEOUT seconds): one GoogleTest program, one CTest
# test, or n of them that run a part each. One program per library keeps relinking small.
function(oom_test name)
  cmake_parse_arguments(arg "" "SHARDS;TIMEOUT" "SOURCES;DEPS;LABELS" ${ARGN})
  add_executable(${name} ${arg_SOURCES})
  target_link_libraries(${name} PRIVATE ${arg_DEPS} GTest::gtest_main oom_options)
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/tests)
  target_compile_definitions(${name} PRIVATE OOM_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 120)
  endif()
  if(NOT arg_SHARDS)
    set(arg_SHARDS 1)
  endif()
  math(EXPR last "${arg_SHARDS} - 1")
  set(test ${name})
  foreach(shard RANGE ${last})
    add_test(NAME ${test} COMMAND ${name})
    set_tests_properties(${test} PROPERTIES LABELS "${arg_LABELS}" TIMEOUT ${arg_TIMEOUT}
      ENVIRONMENT "GTEST_TOTAL_SHARDS=${arg_SHARDS};GTEST_SHARD_INDEX=${shard}")
    math(EXPR next "${shard} + 1")
    set(test ${name}_shard_${next})
  endforeach()
endfunction()
