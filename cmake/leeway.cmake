# Helpers for every module's CMakeLists.txt. A layer is a static library and may include only what
# it links (tests/layers_test.cpp also checks the includes).
include(GoogleTest)

add_library(leeway_options INTERFACE)
# Of this build alone: programs that use the installed libraries choose their own.
target_compile_options(leeway_options INTERFACE
  "$<BUILD_INTERFACE:$<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wpedantic;-Wshadow;-Wconversion;-Wno-sign-conversion;-Wno-missing-field-initializers;-fno-math-errno>>"
  "$<BUILD_INTERFACE:$<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr>>")
target_include_directories(leeway_options INTERFACE
  $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include> $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/src>
  $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
if(LEEWAY_WERROR)
  # But for what g++ 12 guesses after inlining, in correct code of the standard library too.
  target_compile_options(leeway_options INTERFACE
    "$<BUILD_INTERFACE:$<$<COMPILE_LANGUAGE:CXX>:-Werror;-Wno-error=restrict;-Wno-error=maybe-uninitialized;-Wno-error=stringop-overflow;-Wno-error=stringop-overread;-Wno-error=array-bounds;-Wno-error=free-nonheap-object>>")
endif()
if(LEEWAY_SANITIZE)
  # Without the checks of undefined behaviour that cost most to compile and find least: an access through
  # null, or beyond an object, is the address sanitizer's as well. Without warnings, which the other
  # builds give, and which are wrong about code that sanitizers have filled in.
  target_compile_options(leeway_options INTERFACE -fsanitize=${LEEWAY_SANITIZE}
                         -fno-sanitize=null,object-size,vptr
                         -fno-omit-frame-pointer -fno-sanitize-recover=all -w)
  target_link_options(leeway_options INTERFACE -fsanitize=${LEEWAY_SANITIZE})
endif()

# A build from nothing (LEEWAY_COLD_BUILD) is made to be tested, not to be used: only what computes is
# compiled as users have it, the rest with -O1, and the headers that most files begin with are read
# once, except by what includes PyTorch, whose flags differ. Sanitizers multiply the time that a file
# takes, so in their builds tests are compiled with -O0, and the files of a layer several at once.
if(LEEWAY_COLD_BUILD)
  set(CMAKE_PCH_WARN_INVALID OFF)
  set(CMAKE_CXX_FLAGS_RELEASE "-O1 -DNDEBUG")
  find_package(fmt REQUIRED)
  find_package(GTest REQUIRED)
  set(common_headers <algorithm> <atomic> <cmath> <filesystem> <functional> <map> <memory> <mutex>
      <optional> <span> <string> <string_view> <thread> <vector> <fmt/format.h> <fmt/ranges.h>)
  set(empty_source ${CMAKE_BINARY_DIR}/empty.cpp)
  file(CONFIGURE OUTPUT empty.cpp CONTENT "// nothing but headers\n")
  add_library(leeway_layer_headers OBJECT ${empty_source})
  target_link_libraries(leeway_layer_headers PRIVATE leeway_options fmt::fmt)
  target_precompile_headers(leeway_layer_headers PRIVATE ${common_headers})
  # Tests are executables, which are compiled with other flags than libraries.
  add_executable(leeway_test_headers ${empty_source})
  target_link_libraries(leeway_test_headers PRIVATE leeway_options fmt::fmt GTest::gtest_main)
  target_precompile_headers(leeway_test_headers PRIVATE ${common_headers} <chrono> <fstream> <set>
    <sstream> <gtest/gtest.h>)
  if(LEEWAY_SANITIZE)
    target_compile_options(leeway_test_headers PRIVATE -O0)
  endif()
endif()
set(computing_layers kernels core model engine trainer)

# leeway_precompile(TARGET HEADERS ..): a cold build reads the headers once for all files of the target.
function(leeway_precompile target)
  if(LEEWAY_COLD_BUILD AND TARGET ${target})
    target_precompile_headers(${target} PRIVATE ${ARGN})
  endif()
endfunction()

# leeway_layer(NAME SOURCES .. [ALONE ..] LINKS ..)
# ALONE: those of the sources that are never compiled together with others, because they are compiled
# once per SIMD level, or because another source of the layer has a private name of theirs too.
function(leeway_layer name)
  cmake_parse_arguments(ARG "" "" "SOURCES;ALONE;LINKS" ${ARGN})
  add_library(leeway_${name} STATIC ${ARG_SOURCES})
  if(LEEWAY_COLD_BUILD AND LEEWAY_SANITIZE)
    set_target_properties(leeway_${name} PROPERTIES UNITY_BUILD ON)
    if(ARG_ALONE)
      set_source_files_properties(${ARG_ALONE} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
    endif()
  endif()
  target_link_libraries(leeway_${name} PUBLIC leeway_options ${ARG_LINKS})
  if(LEEWAY_COLD_BUILD AND name IN_LIST computing_layers AND NOT LEEWAY_SANITIZE)
    target_compile_options(leeway_${name} PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:-O3>")
  elseif(LEEWAY_COLD_BUILD AND NOT "${ARG_LINKS}" MATCHES torch)
    target_precompile_headers(leeway_${name} REUSE_FROM leeway_layer_headers)
  endif()
endfunction()

# The layers below the operators, as another build folder has them.
function(leeway_built_layers folder)
  foreach(layer base kernels core)
    add_library(leeway_${layer} STATIC IMPORTED GLOBAL)
    set_target_properties(leeway_${layer} PROPERTIES
      IMPORTED_LOCATION ${folder}/src/${layer}/libleeway_${layer}.a)
  endforeach()
  target_link_libraries(leeway_base INTERFACE leeway_options fmt::fmt Threads::Threads)
  target_link_libraries(leeway_kernels INTERFACE leeway_base hwy ${CMAKE_DL_LIBS})
  target_link_libraries(leeway_core INTERFACE leeway_kernels)
endfunction()

# leeway_test(NAME [SERIAL] SOURCES .. LINKS ..): one gtest program; each of its tests is a ctest test.
# SERIAL: they run while no other test does.
function(leeway_test name)
  cmake_parse_arguments(ARG "SERIAL" "" "SOURCES;LINKS" ${ARGN})
  if(LEEWAY_OPS_ONLY)
    return()
  endif()
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE ${ARG_LINKS} GTest::gtest_main)
  target_compile_definitions(${name} PRIVATE LEEWAY_SOURCE_DIR="${PROJECT_SOURCE_DIR}"
                             LEEWAY_BINARY_DIR="${CMAKE_BINARY_DIR}")
  if(LEEWAY_COLD_BUILD AND NOT "${ARG_LINKS}" MATCHES "torch|leeway_ops")
    target_precompile_headers(${name} REUSE_FROM leeway_test_headers)
  endif()
  if(LEEWAY_COLD_BUILD AND LEEWAY_SANITIZE)
    target_compile_options(${name} PRIVATE -O0)
  endif()
  if(LEEWAY_SANITIZE)
    return()  # scripts/run_sanitized runs whole programs, with the options of the sanitizers
  endif()
  set(properties TIMEOUT 600)
  if(ARG_SERIAL)
    set(properties TIMEOUT 1500 RUN_SERIAL TRUE)
  endif()
  gtest_discover_tests(${name} DISCOVERY_TIMEOUT 120 PROPERTIES ${properties})
endfunction()
