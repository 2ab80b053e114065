# libgristmill_cpu_<level>.so: the same sources compiled once per level. Plain shared libraries, opened by torch.ops.load_library;
# they know nothing of Python.
file(GLOB cpu_sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/csrc/*/*_cpu.cpp)
list(APPEND cpu_sources ${CMAKE_SOURCE_DIR}/csrc/torch_cpu.cpp)

foreach(level IN LISTS GRISTMILL_ISA_LEVELS)
  set(library gristmill_cpu_${level})
  string(TOUPPER ${level} macro)
  add_library(${library} SHARED ${cpu_sources})
  gristmill_common_options(${library} "")  # static initialisers register the operators
  target_include_directories(${library} PRIVATE ${CMAKE_SOURCE_DIR}/csrc)
  target_compile_definitions(${library} PRIVATE GRISTMILL_ISA_${macro})
  # No contraction or reassociation behind the author's back: a row's result may not depend on what the optimiser fused.
  target_compile_options(${library} PRIVATE ${GRISTMILL_FLAGS_${level}} -O3 -ffp-contract=off -fno-math-errno -fno-trapping-math)
  target_link_libraries(${library} PRIVATE torch_stable)
  if(CMAKE_SYSTEM_NAME STREQUAL "Linux")
    target_link_options(${library} PRIVATE -Wl,--no-undefined)
  endif()
  install(TARGETS ${library} DESTINATION gristmill_kernels/_native)
endforeach()
