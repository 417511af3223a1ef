# What is installed, and the packages made of it: component `runtime` is the program with its manual pages, completions and tools,
# component `dev` the libraries up to the planner with their headers, for find_package(shardwright) and pkg-config.
# Component `python` is the Python package (python/CMakeLists.txt).
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

# Made from the program's own help.
set(manual "${PROJECT_BINARY_DIR}/manual")
set(completions "${PROJECT_BINARY_DIR}/completions")
add_custom_command(
  OUTPUT "${manual}/stamp"
  COMMAND "${Python3_EXECUTABLE}" -B "${PROJECT_SOURCE_DIR}/python/shardwright/shell.py" --program $<TARGET_FILE:shardwright>
          write "${manual}" "${completions}"
  COMMAND "${CMAKE_COMMAND}" -E touch "${manual}/stamp"
  DEPENDS shardwright "${PROJECT_SOURCE_DIR}/python/shardwright/shell.py"
  COMMENT "Writing manual pages and completions"
  VERBATIM)
add_custom_target(manual ALL DEPENDS "${manual}/stamp")

install(TARGETS shardwright RUNTIME COMPONENT runtime)
install(DIRECTORY "${manual}/" DESTINATION "${CMAKE_INSTALL_MANDIR}/man1" COMPONENT runtime FILES_MATCHING PATTERN "*.1")
install(FILES "${completions}/bash" DESTINATION "${CMAKE_INSTALL_DATADIR}/bash-completion/completions"
  RENAME shardwright COMPONENT runtime)
install(FILES "${completions}/zsh" DESTINATION "${CMAKE_INSTALL_DATADIR}/zsh/site-functions"
  RENAME _shardwright COMPONENT runtime)
install(FILES "${completions}/fish" DESTINATION "${CMAKE_INSTALL_DATADIR}/fish/vendor_completions.d"
  RENAME shardwright.fish COMPONENT runtime)
install(PROGRAMS tools/export_model.py DESTINATION "${CMAKE_INSTALL_DATADIR}/shardwright/tools" COMPONENT runtime)
install(DIRECTORY tools/model_export DESTINATION "${CMAKE_INSTALL_DATADIR}/shardwright/tools" COMPONENT runtime
  FILES_MATCHING PATTERN "*.py" PATTERN "__pycache__" EXCLUDE)
# Where scripts/web.sh has built it.
install(FILES "${PROJECT_BINARY_DIR}/web/shardwright.html" DESTINATION "${CMAKE_INSTALL_DATADIR}/shardwright" COMPONENT runtime OPTIONAL)
install(FILES LICENSE DESTINATION "${CMAKE_INSTALL_DOCDIR}" RENAME copyright COMPONENT runtime)

# The public libraries, each after those that use it, as static linking wants them.
set(public_libraries planner simulator traces schedule topologies models core)
add_library(sw_public INTERFACE)
add_library(shardwright::shardwright ALIAS sw_public)
set_target_properties(sw_public PROPERTIES EXPORT_NAME shardwright)
set(pkgconfig_libraries)
set(library_folder "${CMAKE_INSTALL_LIBDIR}/shardwright")
set(header_folder "${CMAKE_INSTALL_INCLUDEDIR}/shardwright")
foreach(library IN LISTS public_libraries)
  set_target_properties(sw_${library} PROPERTIES EXPORT_NAME ${library})
  target_link_libraries(sw_public INTERFACE sw_${library})
  set(generated)
  get_target_property(sets sw_${library} INTERFACE_HEADER_SETS)
  if("generated" IN_LIST sets)
    set(generated FILE_SET generated DESTINATION "${header_folder}" COMPONENT dev)
  endif()
  install(TARGETS sw_${library} EXPORT shardwright
    ARCHIVE DESTINATION "${library_folder}" COMPONENT dev
    FILE_SET HEADERS DESTINATION "${header_folder}" COMPONENT dev
    ${generated})
  string(APPEND pkgconfig_libraries " -lsw_${library}")
endforeach()
install(TARGETS sw_public EXPORT shardwright)
set(config_folder "${CMAKE_INSTALL_LIBDIR}/cmake/shardwright")
install(EXPORT shardwright NAMESPACE shardwright:: FILE shardwrightTargets.cmake DESTINATION "${config_folder}" COMPONENT dev)
configure_package_config_file(cmake/shardwrightConfig.cmake.in "${PROJECT_BINARY_DIR}/shardwrightConfig.cmake"
  INSTALL_DESTINATION "${config_folder}")
write_basic_package_version_file("${PROJECT_BINARY_DIR}/shardwrightConfigVersion.cmake" COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/shardwrightConfig.cmake" "${PROJECT_BINARY_DIR}/shardwrightConfigVersion.cmake"
  DESTINATION "${config_folder}" COMPONENT dev)
# From the folder of the .pc file to the prefix, so that an installation can be moved.
file(RELATIVE_PATH up_to_prefix "/${CMAKE_INSTALL_LIBDIR}/pkgconfig" "/")
configure_file(cmake/shardwright.pc.in "${PROJECT_BINARY_DIR}/shardwright.pc" @ONLY)
install(FILES "${PROJECT_BINARY_DIR}/shardwright.pc" DESTINATION "${CMAKE_INSTALL_LIBDIR}/pkgconfig" COMPONENT dev)

# cpack in the build folder makes shardwright, shardwright-dev and, where the Python module is built, python3-shardwright
# as Debian packages and as tarballs.
set(CPACK_GENERATOR DEB TGZ)
set(CPACK_PACKAGE_NAME shardwright)
set(CPACK_PACKAGE_CONTACT "Shardwright's authors <shardwright@localhost>")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "${PROJECT_DESCRIPTION}")
set(CPACK_COMPONENTS_ALL runtime dev)
set(CPACK_ARCHIVE_COMPONENT_INSTALL ON)
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SECTION science)
set(CPACK_DEBIAN_RUNTIME_PACKAGE_NAME shardwright)
set(CPACK_DEBIAN_RUNTIME_PACKAGE_SHLIBDEPS ON)
# Loaded by run, eval and calibrate only.
set(CPACK_DEBIAN_RUNTIME_PACKAGE_RECOMMENDS libopenblas0)
set(CPACK_DEBIAN_DEV_PACKAGE_NAME shardwright-dev)
set(CPACK_DEBIAN_DEV_PACKAGE_DEPENDS "zlib1g-dev, libpugixml-dev, libsqlite3-dev")
if(TARGET shardwright_python)
  list(APPEND CPACK_COMPONENTS_ALL python)
  set(CPACK_DEBIAN_PYTHON_PACKAGE_NAME python3-shardwright)
  set(CPACK_DEBIAN_PYTHON_PACKAGE_SHLIBDEPS ON)
  set(CPACK_DEBIAN_PYTHON_PACKAGE_DEPENDS "python3 (>= 3.10)")
endif()
set(CPACK_STRIP_FILES ON)
include(CPack)
