# `cmake --install build --prefix P`: the program with its man page and completions, the public
# headers with the libraries behind them as the CMake package `leeway`, what PyTorch loads, and the
# pages to read.
include(CMakePackageConfigHelpers)
set(package_folder ${CMAKE_INSTALL_LIBDIR}/cmake/leeway)
set(doc_folder ${CMAKE_INSTALL_DATAROOTDIR}/doc/leeway)

install(TARGETS leeway RUNTIME)
install(FILES ${LEEWAY_PAGES}/leeway.1 DESTINATION ${CMAKE_INSTALL_MANDIR}/man1)
install(FILES ${LEEWAY_PAGES}/leeway.bash RENAME leeway
        DESTINATION ${CMAKE_INSTALL_DATAROOTDIR}/bash-completion/completions)
install(FILES ${LEEWAY_PAGES}/_leeway
        DESTINATION ${CMAKE_INSTALL_DATAROOTDIR}/zsh/site-functions)
install(FILES ${LEEWAY_PAGES}/leeway.fish
        DESTINATION ${CMAKE_INSTALL_DATAROOTDIR}/fish/vendor_completions.d)

# find_package(leeway) -> leeway::core, which links the others.
install(DIRECTORY include/leeway DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN *.h)
foreach(name core kernels base options)
  set_target_properties(leeway_${name} PROPERTIES EXPORT_NAME ${name})
endforeach()
target_compile_features(leeway_options INTERFACE cxx_std_20)
install(TARGETS leeway_core leeway_kernels leeway_base leeway_options EXPORT leeway
        ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(EXPORT leeway NAMESPACE leeway:: FILE leeway-targets.cmake DESTINATION ${package_folder})
configure_package_config_file(cmake/leeway-config.cmake.in ${CMAKE_BINARY_DIR}/leeway-config.cmake
                              INSTALL_DESTINATION ${package_folder})
write_basic_package_version_file(${CMAKE_BINARY_DIR}/leeway-config-version.cmake
                                 COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_BINARY_DIR}/leeway-config.cmake
              ${CMAKE_BINARY_DIR}/leeway-config-version.cmake DESTINATION ${package_folder})

# Where they were built. They find each other, and PyTorch where it was when they were linked.
foreach(library leeway_ops leeway_cuda_module)
  if(TARGET ${library})
    set_target_properties(${library} PROPERTIES INSTALL_RPATH "$ORIGIN"
                          INSTALL_RPATH_USE_LINK_PATH ON)
    install(TARGETS ${library} LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} OPTIONAL)
  endif()
endforeach()

install(FILES README.md LICENSE DESTINATION ${doc_folder})
install(FILES CHANGELOG.md DESTINATION ${doc_folder} OPTIONAL)
install(DIRECTORY docs examples DESTINATION ${doc_folder})
