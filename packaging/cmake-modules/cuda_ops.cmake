# libgristmill_cuda.so of kernels-cuda: every csrc/*/*.cu for several GPU generations, on the LibTorch stable ABI. Needs nvcc, and neither a
# GPU nor torch's CUDA build.
#
# Files named *_sm90.cu use instructions that only Hopper has (wgmma, TMA) and are compiled for sm_90a alone, and not at all when 90a is
# left out. Where they are, every other file sees GRISTMILL_WITH_SM90 and may call what they define, on devices of compute capability 9.0.
set(GRISTMILL_CUDA_ARCHS "" CACHE STRING "GPU generations to compile for, e.g. 80,90a; the newest also as PTX; empty: all")
set(all_archs 80 86 89 90a 100)
set(archs ${GRISTMILL_CUDA_ARCHS})
if(NOT archs)
  set(archs $ENV{GRISTMILL_CUDA_ARCHS})
endif()
string(REPLACE "," ";" archs "${archs}")
if(NOT archs)
  set(archs ${all_archs})
endif()
foreach(arch IN LISTS archs)
  if(NOT arch IN_LIST all_archs)
    list(JOIN all_archs ", " choices)
    message(FATAL_ERROR "GRISTMILL_CUDA_ARCHS: '${arch}' is not a GPU generation of this build; choose from ${choices}.")
  endif()
endforeach()

if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
  find_program(GRISTMILL_NVCC nvcc HINTS $ENV{CUDA_HOME}/bin /usr/local/cuda/bin)
  if(NOT GRISTMILL_NVCC)
    message(FATAL_ERROR "kernels-cuda is compiled with nvcc, which was not found: install the CUDA toolkit (13.0 or newer) and put its bin "
      "folder on PATH, or set CUDA_HOME or CUDACXX.")
  endif()
  set(CMAKE_CUDA_COMPILER ${GRISTMILL_NVCC})
endif()
set(CMAKE_CUDA_ARCHITECTURES OFF)  # spelled out below
enable_language(CUDA)
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 13.0)
  message(FATAL_ERROR "kernels-cuda is compiled with nvcc 13.0 or newer, got ${CMAKE_CUDA_COMPILER_VERSION} (${CMAKE_CUDA_COMPILER}).")
endif()
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_EXTENSIONS OFF)

# One image per generation, and PTX of the newest that may run on later ones (code for 90a runs on Hopper alone).
set(images "")
set(newest "")
foreach(arch IN LISTS archs)
  list(APPEND images -gencode=arch=compute_${arch},code=sm_${arch})
  if(NOT arch MATCHES "a$")
    set(newest ${arch})
  endif()
endforeach()
list(TRANSFORM archs PREPEND sm_ OUTPUT_VARIABLE GRISTMILL_CUDA_IMAGES)
if(newest)
  list(APPEND images -gencode=arch=compute_${newest},code=compute_${newest})
  list(APPEND GRISTMILL_CUDA_IMAGES compute_${newest})
endif()

# All that the library takes from libtorch_cuda, in a stub to link with: the result is the same whether or not the torch of the building
# machine has CUDA. At run time `import torch` has loaded the real one. Anything else that is missing ends the link.
set(stub ${CMAKE_BINARY_DIR}/torch_cuda_stub.cpp)
set(stub_functions "")
foreach(name aoti_torch_get_current_cuda_stream torch_c10_cuda_check_msg torch_c10_cuda_free_error_msg)
  string(APPEND stub_functions "extern \"C\" void ${name}() {}\n")
endforeach()
file(CONFIGURE OUTPUT ${stub} CONTENT "${stub_functions}")
add_library(torch_cuda_stub SHARED ${stub})
set_target_properties(torch_cuda_stub PROPERTIES OUTPUT_NAME torch_cuda LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/stubs)

file(GLOB cuda_sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/csrc/*/*.cu)
set(hopper_sources ${cuda_sources})
list(FILTER hopper_sources INCLUDE REGEX "_sm90\\.cu$")
list(FILTER cuda_sources EXCLUDE REGEX "_sm90\\.cu$")
function(gristmill_cuda_objects name)
  add_library(${name} OBJECT ${ARGN})
  set_target_properties(${name} PROPERTIES
    POSITION_INDEPENDENT_CODE ON CUDA_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON CUDA_ARCHITECTURES OFF)
  target_include_directories(${name} PRIVATE ${CMAKE_SOURCE_DIR}/csrc)
  target_include_directories(${name} SYSTEM PRIVATE ${torch_dir}/include)
  target_compile_definitions(${name} PRIVATE TORCH_TARGET_VERSION=${torch_target_version} USE_CUDA)
  target_compile_options(${name} PRIVATE --compress-mode=size -Xcompiler=-Wall,-Wextra,-ffunction-sections,-fdata-sections
    -Xcompiler=-ffile-prefix-map=${CMAKE_SOURCE_DIR}/=,-ffile-prefix-map=${torch_dir}/include/=,-ffile-prefix-map=${CMAKE_BINARY_DIR}/=)
endfunction()
gristmill_cuda_objects(cuda_kernels ${cuda_sources})
target_compile_options(cuda_kernels PRIVATE ${images})
set(objects $<TARGET_OBJECTS:cuda_kernels>)
if(hopper_sources AND "90a" IN_LIST archs)
  gristmill_cuda_objects(cuda_kernels_sm90 ${hopper_sources})
  target_compile_options(cuda_kernels_sm90 PRIVATE -gencode=arch=compute_90a,code=sm_90a)
  target_compile_definitions(cuda_kernels PRIVATE GRISTMILL_WITH_SM90)
  list(APPEND objects $<TARGET_OBJECTS:cuda_kernels_sm90>)
endif()

# The runtime is linked statically, so that one wheel serves every torch of the same CUDA major version.
get_filename_component(toolkit ${CMAKE_CUDA_COMPILER} REALPATH)
get_filename_component(toolkit ${toolkit}/../.. ABSOLUTE)
find_library(GRISTMILL_CUDART cudart_static
  HINTS ${CMAKE_CUDA_IMPLICIT_LINK_DIRECTORIES} ${CMAKE_CUDA_HOST_IMPLICIT_LINK_DIRECTORIES} ${toolkit}/lib64 ${toolkit}/lib REQUIRED)
add_library(gristmill_cuda SHARED ${objects})
set_target_properties(gristmill_cuda PROPERTIES LINKER_LANGUAGE CXX)
gristmill_common_options(gristmill_cuda "")  # static initialisers register the operators
target_link_libraries(gristmill_cuda PRIVATE torch_stable torch_cuda_stub ${GRISTMILL_CUDART} dl pthread rt)
target_link_options(gristmill_cuda PRIVATE -Wl,--no-undefined -Wl,--exclude-libs,ALL)
install(TARGETS gristmill_cuda DESTINATION gristmill_kernels/_native)

# What loader_gpu.py asks before it opens the library, beside it so that the two never part.
list(JOIN GRISTMILL_CUDA_IMAGES "\", \"" cuda_images)
string(REGEX MATCH "^[0-9]+\\.[0-9]+" cuda_version ${CMAKE_CUDA_COMPILER_VERSION})
file(CONFIGURE OUTPUT ${CMAKE_BINARY_DIR}/libgristmill_cuda.json
  CONTENT "{\"archs\": [\"${cuda_images}\"], \"cuda\": \"${cuda_version}\"}\n")
install(FILES ${CMAKE_BINARY_DIR}/libgristmill_cuda.json DESTINATION gristmill_kernels/_native)
