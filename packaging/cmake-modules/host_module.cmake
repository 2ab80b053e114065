# gristmill_kernels._host: pybind11, no torch, baseline instructions of the architecture.
set(PYBIND11_FINDPYTHON ON)
if(NOT pybind11_DIR)
  execute_process(COMMAND ${Python_EXECUTABLE} -m pybind11 --cmakedir
    OUTPUT_VARIABLE pybind11_DIR OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
endif()
find_package(pybind11 2.13 CONFIG REQUIRED)

file(GLOB host_sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/csrc/host/*.cpp)
pybind11_add_module(_host MODULE NO_EXTRAS ${host_sources})
gristmill_common_options(_host PyInit__host)
target_compile_definitions(_host PRIVATE
  GRISTMILL_VERSION="${GRISTMILL_VERSION}"
  GRISTMILL_PLATFORM="${GRISTMILL_PLATFORM}")
install(TARGETS _host DESTINATION gristmill_kernels)
