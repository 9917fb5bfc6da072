# Imported targets LibTorch::cpu (headers and the CPU libraries of an installed torch of the wanted version) and,
# where that torch was built for CUDA, LibTorch::cuda, and NCCL::nccl, the one that torch uses.
# Looked for in OOM_TORCH_DIR (a folder that holds include/ and lib/), else in the `torch` package of
# OOM_PYTHON. Torch's own find_package refuses a machine without CUDA, and its include folder carries its
# own fmt and protobuf headers: given with -idirafter they cannot hide the system's.

set(OOM_TORCH_VERSION 2.11.0)
if(NOT OOM_TORCH_DIR)
  if(NOT OOM_PYTHON)
    find_program(OOM_PYTHON NAMES python3)
  endif()
  execute_process(
    COMMAND ${OOM_PYTHON} -c "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
    OUTPUT_VARIABLE OOM_TORCH_DIR OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
endif()

set(LibTorch_FOUND FALSE)
if(OOM_TORCH_DIR AND EXISTS ${OOM_TORCH_DIR}/lib/libtorch_cpu.so)
  file(STRINGS ${OOM_TORCH_DIR}/version.py version_line REGEX "^__version__")
  if(NOT version_line MATCHES "${OOM_TORCH_VERSION}")
    message(FATAL_ERROR "torch in ${OOM_TORCH_DIR} is not ${OOM_TORCH_VERSION}: ${version_line}")
  endif()
  add_library(LibTorch::cpu INTERFACE IMPORTED)
  target_compile_options(LibTorch::cpu INTERFACE
    $<$<COMPILE_LANGUAGE:CXX>:SHELL:-idirafter ${OOM_TORCH_DIR}/include>)
  target_link_libraries(LibTorch::cpu INTERFACE
    ${OOM_TORCH_DIR}/lib/libtorch_cpu.so ${OOM_TORCH_DIR}/lib/libc10.so)
  target_link_options(LibTorch::cpu INTERFACE -Wl,-rpath,${OOM_TORCH_DIR}/lib -Wl,--as-needed)
  set(LibTorch_FOUND TRUE)
  if(EXISTS ${OOM_TORCH_DIR}/lib/libtorch_cuda.so)
    add_library(LibTorch::cuda INTERFACE IMPORTED)
    # Operators register themselves when the library is loaded; nothing refers to it by name.
    target_link_libraries(LibTorch::cuda INTERFACE LibTorch::cpu ${OOM_TORCH_DIR}/lib/libc10_cuda.so
      -Wl,--no-as-needed ${OOM_TORCH_DIR}/lib/libtorch_cuda.so -Wl,--as-needed)
    target_include_directories(LibTorch::cuda INTERFACE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
    # Of the NVIDIA packages beside torch.
    file(GLOB cuda_library_folders ${OOM_TORCH_DIR}/../nvidia/*/lib)
    foreach(folder ${cuda_library_folders})
      file(REAL_PATH ${folder} folder)
      target_link_options(LibTorch::cuda INTERFACE -Wl,-rpath,${folder} -Wl,-rpath-link,${folder})
    endforeach()
    file(REAL_PATH ${OOM_TORCH_DIR}/../nvidia/nccl nccl_folder)
    add_library(NCCL::nccl INTERFACE IMPORTED)
    target_include_directories(NCCL::nccl INTERFACE ${nccl_folder}/include)
    target_link_libraries(NCCL::nccl INTERFACE ${nccl_folder}/lib/libnccl.so.2)
    target_link_options(NCCL::nccl INTERFACE -Wl,-rpath,${nccl_folder}/lib)
  endif()
endif()
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(LibTorch REQUIRED_VARS OOM_TORCH_DIR LibTorch_FOUND)
