# Run by `cmake --install` and cpack (cmake/VrdmaPackage.cmake sets the variables): what is made while it is installed, straight into its
# place. Who installs as root leaves nothing in the build folder that its owner cannot write.

# CMake's own list of what was installed, written anew at the end: who owns the folder can remove it, but not write one that is root's.
file(REMOVE ${BUILD}/install_manifest.txt)

# Where root may have a umask of its own.
set(readable PERMISSIONS OWNER_READ OWNER_WRITE GROUP_READ WORLD_READ)

macro(installed file)
  message(STATUS "Installing: $ENV{DESTDIR}${file}")
  list(APPEND CMAKE_INSTALL_MANIFEST_FILES ${file})
endmacro()

# Compressed, as distributions want manual pages and changelogs, where there is a gzip.
macro(install_page from folder)
  if(EXISTS "${GZIP}")
    get_filename_component(name ${from} NAME)
    file(MAKE_DIRECTORY $ENV{DESTDIR}${folder})
    execute_process(COMMAND ${GZIP} -9nc ${from} OUTPUT_FILE $ENV{DESTDIR}${folder}/${name}.gz RESULT_VARIABLE failed)
    if(failed)
      message(FATAL_ERROR "cannot write $ENV{DESTDIR}${folder}/${name}.gz")
    endif()
    file(CHMOD $ENV{DESTDIR}${folder}/${name}.gz ${readable})
    installed(${folder}/${name}.gz)
  else()
    file(INSTALL ${from} DESTINATION ${folder})
  endif()
endmacro()

macro(install_configured from to)
  configure_file(${SOURCE}/packaging/${from}.in $ENV{DESTDIR}${to} @ONLY)
  file(CHMOD $ENV{DESTDIR}${to} ${readable})
  installed(${to})
endmacro()

foreach(section 1 5 8)
  file(GLOB pages ${SOURCE}/docs/man/*.${section})
  foreach(page ${pages})
    install_page(${page} ${CMAKE_INSTALL_PREFIX}/${MAN_FOLDER}/man${section})
  endforeach()
endforeach()
install_page(${SOURCE}/packaging/debian/changelog ${CMAKE_INSTALL_PREFIX}/${DOC_FOLDER})

# /usr's configuration is in /etc, any other prefix has its own; the unit names both as they are where it is installed.
set(VRDMA_BIN_FOLDER ${CMAKE_INSTALL_PREFIX}/${BIN_FOLDER})
set(VRDMA_LIBRARY_FOLDER ${CMAKE_INSTALL_PREFIX}/${LIB_FOLDER}/vrdma)
set(VRDMA_CONFIG_FOLDER ${CMAKE_INSTALL_PREFIX}/etc/vrdma)
set(VRDMA_CDI_FOLDER ${CMAKE_INSTALL_PREFIX}/etc/cdi)
if(CMAKE_INSTALL_PREFIX STREQUAL "/usr")
  set(VRDMA_CONFIG_FOLDER /etc/vrdma)
  set(VRDMA_CDI_FOLDER /etc/cdi)
endif()
set(units ${CMAKE_INSTALL_PREFIX}/lib/systemd/system)
install_configured(vrdmad.service ${units}/vrdmad.service)
install_configured(vrdma-guestd.service ${units}/vrdma-guestd.service)
install_configured(cdi.json ${VRDMA_CDI_FOLDER}/vrdma.json)
file(INSTALL ${SOURCE}/packaging/vrdmad.socket DESTINATION ${units})
file(INSTALL ${SOURCE}/packaging/vrdmad.json DESTINATION ${VRDMA_CONFIG_FOLDER})
