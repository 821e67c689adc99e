# What is installed besides the programs and the library, and the Debian package (`cpack -G DEB` in the build folder).
# Everything is relative to the prefix of the installation, so that a package, /usr/local and ~/somewhere all work.

install(FILES ${PROJECT_SOURCE_DIR}/packaging/vrdma.bash DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions RENAME vrdma)
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DATADIR}/doc/vrdma RENAME copyright)
install(FILES ${PROJECT_SOURCE_DIR}/README.md ${PROJECT_SOURCE_DIR}/docs/troubleshooting.md ${PROJECT_SOURCE_DIR}/docs/vm.md
              ${PROJECT_SOURCE_DIR}/docs/containers.md ${PROJECT_SOURCE_DIR}/docs/direct.md ${PROJECT_SOURCE_DIR}/docs/hosts.md ${PROJECT_SOURCE_DIR}/docs/management.md
              ${PROJECT_SOURCE_DIR}/docs/rdma_cm.md ${PROJECT_SOURCE_DIR}/docs/subnet.md ${PROJECT_SOURCE_DIR}/docs/performance.md
        DESTINATION ${CMAKE_INSTALL_DATADIR}/doc/vrdma)
install(FILES ${PROJECT_SOURCE_DIR}/packaging/vrdmad-hosts.conf DESTINATION ${CMAKE_INSTALL_DATADIR}/doc/vrdma)
foreach(section 1 5 8)
  file(GLOB pages CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/docs/man/*.${section})
  install(FILES ${pages} DESTINATION ${CMAKE_INSTALL_DATADIR}/man/man${section})
endforeach()

# /usr's configuration is in /etc, any other prefix has its own; the unit names both as they are where it is installed.
install(CODE "
  set(VRDMA_BIN_FOLDER \${CMAKE_INSTALL_PREFIX}/${CMAKE_INSTALL_BINDIR})
  set(VRDMA_LIBRARY_FOLDER \${CMAKE_INSTALL_PREFIX}/${CMAKE_INSTALL_LIBDIR}/vrdma)
  set(VRDMA_CONFIG_FOLDER \${CMAKE_INSTALL_PREFIX}/etc/vrdma)
  set(VRDMA_CDI_FOLDER \${CMAKE_INSTALL_PREFIX}/etc/cdi)
  if(CMAKE_INSTALL_PREFIX STREQUAL \"/usr\")
    set(VRDMA_CONFIG_FOLDER /etc/vrdma)
    set(VRDMA_CDI_FOLDER /etc/cdi)
  endif()
  configure_file(${PROJECT_SOURCE_DIR}/packaging/vrdmad.service.in ${PROJECT_BINARY_DIR}/vrdmad.service @ONLY)
  configure_file(${PROJECT_SOURCE_DIR}/packaging/vrdma-guestd.service.in ${PROJECT_BINARY_DIR}/vrdma-guestd.service @ONLY)
  file(INSTALL ${PROJECT_BINARY_DIR}/vrdmad.service ${PROJECT_BINARY_DIR}/vrdma-guestd.service ${PROJECT_SOURCE_DIR}/packaging/vrdmad.socket
       DESTINATION \${CMAKE_INSTALL_PREFIX}/lib/systemd/system)
  configure_file(${PROJECT_SOURCE_DIR}/packaging/cdi.json.in ${PROJECT_BINARY_DIR}/vrdma.json @ONLY)
  file(INSTALL ${PROJECT_BINARY_DIR}/vrdma.json DESTINATION \${VRDMA_CDI_FOLDER})
  file(INSTALL ${PROJECT_SOURCE_DIR}/packaging/vrdmad.json DESTINATION \${VRDMA_CONFIG_FOLDER})")

set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME vrdma)
set(CPACK_PACKAGE_VENDOR vrdma)
set(CPACK_PACKAGE_CONTACT "The vrdma project <vrdma@localhost>")
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_STRIP_FILES ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SECTION net)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_RECOMMENDS "ibverbs-utils, perftest, python3")  # python3: vrdma bench
set(CPACK_DEBIAN_PACKAGE_SUGGESTS "gnuplot-nox, ucx-utils, libfabric-bin, openmpi-bin")  # its pictures, and whom it measures beside
set(CPACK_VERBATIM_VARIABLES TRUE)  # quotes are quotes
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "RDMA verbs for processes, containers and VMs without an HCA")
set(CPACK_DEBIAN_PACKAGE_DESCRIPTION "Programs that use libibverbs run unmodified: a library stands in for libibverbs and
a service on the host moves the bytes. No HCA, no kernel module, no root.

The system's libibverbs is left alone; \"vrdma run\" puts the library in its place
for one program.")
set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)
set(CPACK_DEBIAN_PACKAGE_CONTROL_EXTRA
    ${PROJECT_SOURCE_DIR}/packaging/debian/postinst ${PROJECT_SOURCE_DIR}/packaging/debian/prerm
    ${PROJECT_SOURCE_DIR}/packaging/debian/postrm ${PROJECT_SOURCE_DIR}/packaging/debian/conffiles)
include(CPack)
