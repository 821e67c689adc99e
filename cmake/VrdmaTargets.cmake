# What every target of the project shares: language level, warnings, sanitizers, output folders,
# and the two helpers vrdma_library() and vrdma_test().

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/bin)
set(CMAKE_LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/lib)
set(CMAKE_ARCHIVE_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/archive)

if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE RelWithDebInfo)
endif()

set(VRDMA_SANITIZE "" CACHE STRING "Sanitizers for every target: address,undefined or thread")
option(VRDMA_FAULT_POINTS "Compile the crash points of vrdma/fault.hpp in (tests/crash has builds of its own)" OFF)
option(VRDMA_FUZZ "Build the libFuzzer targets (clang only)" OFF)

find_package(Threads REQUIRED)
find_package(Boost 1.77 REQUIRED)
find_package(nlohmann_json 3.11 REQUIRED)
find_package(fmt 9 REQUIRED)
find_package(spdlog 1.10 REQUIRED)

add_library(vrdma_flags INTERFACE)
target_compile_options(vrdma_flags INTERFACE -Wall -Wextra -Wshadow -Wconversion -Wno-sign-conversion -Werror
                       -fno-strict-aliasing -fvisibility=hidden -fvisibility-inlines-hidden)
# glibc's sigset and FD_* macros and Boost headers are system headers to us.
target_link_libraries(vrdma_flags INTERFACE Threads::Threads)
if(VRDMA_SANITIZE)
  # Sanitizers make g++ 12 guess at uninitialised and unsupported things that are not there: the other builds hold the line.
  target_compile_options(vrdma_flags INTERFACE -Wno-error -fsanitize=${VRDMA_SANITIZE} -fno-omit-frame-pointer
                         -fno-sanitize-recover=all)
  target_link_options(vrdma_flags INTERFACE -fsanitize=${VRDMA_SANITIZE})
endif()
if(VRDMA_FAULT_POINTS)
  target_compile_definitions(vrdma_flags INTERFACE VRDMA_FAULT_POINTS)
endif()
if(VRDMA_FUZZ)
  target_compile_options(vrdma_flags INTERFACE -fsanitize=fuzzer-no-link)
endif()

# vrdma_library(name [SOURCES ...] [LIBS ...]): a static (or, without sources, header-only) room of the project.
function(vrdma_library name)
  cmake_parse_arguments(ARG "" "" "SOURCES;LIBS" ${ARGN})
  if(ARG_SOURCES)
    add_library(${name} STATIC ${ARG_SOURCES})
    target_include_directories(${name} PUBLIC ${PROJECT_SOURCE_DIR} ${PROJECT_SOURCE_DIR}/include)
    target_link_libraries(${name} PUBLIC ${ARG_LIBS} PRIVATE vrdma_flags)
  else()
    add_library(${name} INTERFACE)
    target_include_directories(${name} INTERFACE ${PROJECT_SOURCE_DIR} ${PROJECT_SOURCE_DIR}/include)
    target_link_libraries(${name} INTERFACE ${ARG_LIBS})
  endif()
endfunction()

# vrdma_test(name SOURCES ... [LIBS ...] [LABELS ...] [TIMEOUT seconds]): a doctest program run under ctest.
function(vrdma_test name)
  cmake_parse_arguments(ARG "" "TIMEOUT" "SOURCES;LIBS;LABELS" ${ARGN})
  if(NOT BUILD_TESTING)
    return()
  endif()
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 120)
  endif()
  if(NOT ARG_LABELS)
    set(ARG_LABELS unit)
  endif()
  add_executable(${name} ${ARG_SOURCES} ${PROJECT_SOURCE_DIR}/tests/doctest_main.cpp)
  target_link_libraries(${name} PRIVATE ${ARG_LIBS} vrdma_flags)
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/tests)
  add_test(NAME ${name} COMMAND ${name})
  set_tests_properties(${name} PROPERTIES TIMEOUT ${ARG_TIMEOUT} LABELS "${ARG_LABELS}")
endfunction()

# vrdma_fuzz(name SOURCES ... [LIBS ...]): a libFuzzer program in the fuzz preset; ctest runs it for ten seconds from its seeds
# in tests/fuzz/corpus/<name>. What it finds it leaves in the build folder.
function(vrdma_fuzz name)
  cmake_parse_arguments(ARG "" "" "SOURCES;LIBS" ${ARGN})
  if(NOT VRDMA_FUZZ OR NOT BUILD_TESTING)
    return()
  endif()
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE ${ARG_LIBS} vrdma_flags)
  target_link_options(${name} PRIVATE -fsanitize=fuzzer)
  set(found ${PROJECT_BINARY_DIR}/fuzz/${name})
  file(MAKE_DIRECTORY ${found})
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/tests)
  add_test(NAME ${name} COMMAND ${name} -max_total_time=10 -timeout=10 -rss_limit_mb=2048 -max_len=16384
           ${found} ${PROJECT_SOURCE_DIR}/tests/fuzz/corpus/${name} WORKING_DIRECTORY ${found})
  set_tests_properties(${name} PROPERTIES LABELS fuzz TIMEOUT 120)
endfunction()
