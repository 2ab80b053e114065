# gristmill_kernels/_build_info.py: what was built, for capabilities() and for error messages. No time and no paths: builds repeat.
set(isa_tuple "")
foreach(level IN LISTS GRISTMILL_ISA_LEVELS)
  string(APPEND isa_tuple "\"${level}\", ")
endforeach()
configure_file(${CMAKE_SOURCE_DIR}/packaging/cmake-modules/_build_info.py.in ${CMAKE_BINARY_DIR}/_build_info.py @ONLY)
install(FILES ${CMAKE_BINARY_DIR}/_build_info.py DESTINATION gristmill_kernels)
