# What every shared object of the wheel has in common: it carries its C++ runtime, shows one symbol at most, and remembers neither
# where it was built nor where torch was.
function(gristmill_common_options target exported)
  set_target_properties(${target} PROPERTIES
    POSITION_INDEPENDENT_CODE ON
    CXX_VISIBILITY_PRESET hidden
    VISIBILITY_INLINES_HIDDEN ON
    SKIP_BUILD_RPATH ON
    INSTALL_RPATH "")
  target_compile_options(${target} PRIVATE
    -Wall -Wextra -ffunction-sections -fdata-sections -ffile-prefix-map=${CMAKE_SOURCE_DIR}/=)
  if(CMAKE_SYSTEM_NAME STREQUAL "Linux")
    # libstdc++'s templates have default visibility whatever the flags say. Unlisted, a copy compiled for AVX-512 cannot be picked up
    # by anyone else in the process.
    set(exports ${CMAKE_CURRENT_BINARY_DIR}/${target}.map)
    if(exported)
      file(CONFIGURE OUTPUT ${exports} CONTENT "{ global: ${exported}; local: *; };\n")
    else()
      file(CONFIGURE OUTPUT ${exports} CONTENT "{ local: *; };\n")
    endif()
    # A newer libstdc++ would raise the versions that the wheel's tag has to promise, so it is linked statically and pruned to what
    # is used. libgcc stays shared: exceptions pass through torch, and the unwinder's interface has been the same for decades.
    target_link_options(${target} PRIVATE
      -static-libstdc++ -Wl,--version-script=${exports} -Wl,--gc-sections -Wl,--as-needed -Wl,-z,relro,-z,now)
    set_property(TARGET ${target} APPEND PROPERTY LINK_DEPENDS ${exports})
  endif()
endfunction()
