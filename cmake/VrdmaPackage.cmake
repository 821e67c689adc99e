# What is installed besides the programs and the library, and the Debian package (`cpack -G DEB` in the build folder).
# Everything is relative to the prefix of the installation, so that a package, /usr/local and ~/somewhere all work.

install(FILES ${PROJECT_SOURCE_DIR}/packaging/vrdma.bash DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions RENAME vrdma)
# The pages point at each other as docs/NAME, from where README.md is.
set(doc_folder ${CMAKE_INSTALL_DATADIR}/doc/vrdma)
install(FILES ${PROJECT_SOURCE_DIR}/README.md ${PROJECT_SOURCE_DIR}/packaging/vrdmad-hosts.conf DESTINATION ${doc_folder})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/docs DESTINATION ${doc_folder} PATTERN man EXCLUDE)

# Debian's machine-readable form of the licence: its text is indented, and its empty lines are dots.
file(READ ${PROJECT_SOURCE_DIR}/LICENSE licence)
string(REGEX MATCH "Copyright [^\n]*" copyright "${licence}")
string(REGEX REPLACE "^.*Copyright [^\n]*\n+" "" licence "${licence}")
string(STRIP "${licence}" licence)
string(REGEX REPLACE "\n\n+" "\n.\n" licence "${licence}")
string(REPLACE "\n" "\n " licence "${licence}")
string(REGEX REPLACE "^Copyright (\\(c\\) )?" "" copyright "${copyright}")
file(WRITE ${PROJECT_BINARY_DIR}/copyright "Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/
Upstream-Name: vrdma

Files: *
Copyright: ${copyright}
License: BSD-2-Clause
 ${licence}
")
install(FILES ${PROJECT_BINARY_DIR}/copyright DESTINATION ${doc_folder})

# Manual pages, the changelog, and what names the folders that it is installed to.
find_program(GZIP gzip)
install(CODE "
  set(SOURCE ${PROJECT_SOURCE_DIR})
  set(BUILD ${CMAKE_BINARY_DIR})
  set(BIN_FOLDER ${CMAKE_INSTALL_BINDIR})
  set(LIB_FOLDER ${CMAKE_INSTALL_LIBDIR})
  set(MAN_FOLDER ${CMAKE_INSTALL_DATADIR}/man)
  set(DOC_FOLDER ${doc_folder})
  set(GZIP ${GZIP})")
install(SCRIPT ${CMAKE_CURRENT_LIST_DIR}/install_made.cmake)

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
