# What every shared object of the wheel has in common: it carries its C++ runtime, shows no symbols it need not, and remembers
# neither where it was built nor where torch was.
function(gristmill_common_options target)
  set_target_properties(${target} PROPERTIES
    POSITION_INDEPENDENT_CODE ON
    CXX_VISIBILITY_PRESET hidden
    VISIBILITY_INLINES_HIDDEN ON
    SKIP_BUILD_RPATH ON
    INSTALL_RPATH "")
  target_compile_options(${target} PRIVATE -Wall -Wextra -ffile-prefix-map=${CMAKE_SOURCE_DIR}/=)
  if(CMAKE_SYSTEM_NAME STREQUAL "Linux")
    # A new libstdc++ would raise the glibc/GLIBCXX versions that the wheel's tag has to promise. libgcc stays shared: exceptions
    # pass through torch, and the unwinder has been the same for decades.
    target_link_options(${target} PRIVATE -static-libstdc++ -Wl,--exclude-libs,ALL -Wl,--as-needed -Wl,-z,relro,-z,now)
  endif()
endfunction()
