# Target `torch_stable`: headers and library of the torch in this Python, restricted to the LibTorch stable ABI of GRISTMILL_TORCH_TARGET.
# The op libraries then load on that torch and every later one; which torch was installed at build time does not matter.
set(GRISTMILL_TORCH_TARGET "2.10")
set(torch_target_version 0x020a000000000000)

execute_process(
  COMMAND ${Python_EXECUTABLE} -c
    "import importlib.metadata as m, importlib.util as u; s = u.find_spec('torch'); print(m.version('torch'), s.submodule_search_locations[0], sep=';')"
  OUTPUT_VARIABLE torch_found OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE torch_missing)
if(torch_missing)
  message(FATAL_ERROR "The op libraries need the headers of torch>=${GRISTMILL_TORCH_TARGET}, but ${Python_EXECUTABLE} has no torch: "
    "install torch first, or build with isolation.")
endif()
list(GET torch_found 0 GRISTMILL_TORCH_BUILT_WITH)
list(GET torch_found 1 torch_dir)
if(GRISTMILL_TORCH_BUILT_WITH VERSION_LESS GRISTMILL_TORCH_TARGET)
  message(FATAL_ERROR "The op libraries need the headers of torch>=${GRISTMILL_TORCH_TARGET}, got torch ${GRISTMILL_TORCH_BUILT_WITH}.")
endif()

add_library(torch_stable INTERFACE)
target_include_directories(torch_stable SYSTEM INTERFACE ${torch_dir}/include)
target_compile_definitions(torch_stable INTERFACE TORCH_TARGET_VERSION=${torch_target_version})
target_compile_options(torch_stable INTERFACE -ffile-prefix-map=${torch_dir}/include/=)
# Found at run time because `import torch` has loaded it already; so no RPATH is needed.
target_link_libraries(torch_stable INTERFACE ${torch_dir}/lib/${CMAKE_SHARED_LIBRARY_PREFIX}torch_cpu${CMAKE_SHARED_LIBRARY_SUFFIX})
