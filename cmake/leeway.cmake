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
if(LEEWAY_SANITIZE)
  target_compile_options(leeway_options INTERFACE -fsanitize=${LEEWAY_SANITIZE}
                         -fno-omit-frame-pointer -fno-sanitize-recover=all)
  target_link_options(leeway_options INTERFACE -fsanitize=${LEEWAY_SANITIZE})
endif()

# leeway_layer(NAME SOURCES .. LINKS ..)
function(leeway_layer name)
  cmake_parse_arguments(ARG "" "" "SOURCES;LINKS" ${ARGN})
  add_library(leeway_${name} STATIC ${ARG_SOURCES})
  target_link_libraries(leeway_${name} PUBLIC leeway_options ${ARG_LINKS})
endfunction()

# leeway_test(NAME [SERIAL] SOURCES .. LINKS ..): one gtest program; each of its tests is a ctest test.
# SERIAL: they run while no other test does.
function(leeway_test name)
  cmake_parse_arguments(ARG "SERIAL" "" "SOURCES;LINKS" ${ARGN})
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE ${ARG_LINKS} GTest::gtest_main)
  target_compile_definitions(${name} PRIVATE LEEWAY_SOURCE_DIR="${PROJECT_SOURCE_DIR}"
                             LEEWAY_BINARY_DIR="${CMAKE_BINARY_DIR}")
  set(properties TIMEOUT 600)
  if(ARG_SERIAL)
    set(properties TIMEOUT 900 RUN_SERIAL TRUE)
  endif()
  gtest_discover_tests(${name} DISCOVERY_TIMEOUT 120 PROPERTIES ${properties})
endfunction()
