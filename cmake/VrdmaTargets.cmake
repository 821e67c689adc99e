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
option(VRDMA_UNITY "Compile neighbouring files together (vrdma_unity); the preset dev compiles each by itself" ON)
option(VRDMA_FUZZ "Build the libFuzzer targets (clang only)" OFF)

find_package(Threads REQUIRED)
find_package(Boost 1.81 REQUIRED)
find_package(nlohmann_json 3.11 REQUIRED)
find_package(fmt 9 REQUIRED)
find_package(spdlog 1.10 REQUIRED)

# Warnings are errors for the compilers that every change is built with, as it is built (CMakePresets.json). What others guess at (g++ 14:
# array bounds inside std::vector's copies; g++ 12 by -O3: overlaps inside std::string's) is to stop nobody's build.
set(werror_default OFF)
if(CMAKE_BUILD_TYPE MATCHES "^(RelWithDebInfo|Debug)$" AND
   ((CMAKE_CXX_COMPILER_ID STREQUAL GNU AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13) OR
    (CMAKE_CXX_COMPILER_ID MATCHES Clang AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 15)))
  set(werror_default ON)
endif()
option(VRDMA_WERROR "Warnings are errors" ${werror_default})

# Executables are placed at random, as libraries are (CMAKE_POSITION_INDEPENDENT_CODE).
include(CheckPIESupported)
check_pie_supported(LANGUAGES C CXX)

add_library(vrdma_flags INTERFACE)
# No strict aliasing: what lies in segments, mailboxes and programs' memory are bytes that are used as the records, words and vectors that
# they hold, and C++20 has no way to say so.
target_compile_options(vrdma_flags INTERFACE -Wall -Wextra -Wshadow -Wconversion -Wno-sign-conversion $<$<BOOL:${VRDMA_WERROR}>:-Werror>
                       -fno-strict-aliasing -fvisibility=hidden -fvisibility-inlines-hidden)
# Neighbouring fields that were stored one by one and are then copied as one vector cannot be forwarded: the copy waits until every store
# before it, the payload's too, has reached the cache.
target_compile_options(vrdma_flags INTERFACE -fno-tree-slp-vectorize)
target_link_libraries(vrdma_flags INTERFACE Threads::Threads)
if(VRDMA_SANITIZE)
  target_compile_options(vrdma_flags INTERFACE -fsanitize=${VRDMA_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all)
  if(CMAKE_CXX_COMPILER_ID STREQUAL GNU)
    # Sanitizers make g++ 12 guess at uninitialised and unsupported things that are not there: the other builds hold the line.
    target_compile_options(vrdma_flags INTERFACE -Wno-error)
  else()
    # The verbs are an interface of C, whose enumerations hold what a caller puts there.
    target_compile_options(vrdma_flags INTERFACE -fno-sanitize=enum)
  endif()
  target_link_options(vrdma_flags INTERFACE -fsanitize=${VRDMA_SANITIZE})
endif()
if(VRDMA_FAULT_POINTS)
  target_compile_definitions(vrdma_flags INTERFACE VRDMA_FAULT_POINTS)
endif()
if(VRDMA_FUZZ)
  target_compile_options(vrdma_flags INTERFACE -fsanitize=fuzzer-no-link)
endif()

# vrdma_quick_to_build(target...): for what is not in the way of data. Under a sanitizer it is compiled without optimisation, which takes
# half as long; else with little.
function(vrdma_quick_to_build)
  set(level $<$<NOT:$<CONFIG:Debug>>:-O1>)
  if(VRDMA_SANITIZE)
    set(level -O0)
  endif()
  foreach(target ${ARGN})
    target_compile_options(${target} PRIVATE ${level})
  endforeach()
endfunction()

# vrdma_hardened(target...): what of the shipped programs parses others' bytes, some of it with capabilities: a return address that was
# written over, or a buffer of libc's calls that is too small, ends the process, and the table of libc's functions is read-only. Not for
# libvrdma, which lives in programs of other builds, and what it is linked with.
function(vrdma_hardened)
  foreach(target ${ARGN})
    get_target_property(type ${target} TYPE)
    if(type STREQUAL EXECUTABLE)
      target_link_options(${target} PRIVATE -Wl,-z,relro,-z,now)
    endif()
    if(NOT VRDMA_SANITIZE)  # a sanitizer sees more by its own copies of those calls
      target_compile_options(${target} PRIVATE -fstack-protector-strong)
      target_compile_options(${target} PRIVATE "$<$<NOT:$<CONFIG:Debug>>:-U_FORTIFY_SOURCE;-D_FORTIFY_SOURCE=2>")  # which needs optimisation
    endif()
  endforeach()
endfunction()

# vrdma_unity(target [ALONE source...]): compiles the files of a folder together, in equal shares of at most vrdma_unity_files, because
# the headers and templates that they have in common cost more than what is their own: vrdma_cli takes 24 s of a processor's time in two
# shares and 17 s in one. A file that was touched costs some 30 s at most (22 s by itself), and g++ 1.2 GB.
# ALONE: what moves the data, so that its code does not depend on its neighbours. A file that has the property UNITY_GROUP keeps it.
set(vrdma_unity_files 20)
function(vrdma_unity target)
  cmake_parse_arguments(ARG "" "" "ALONE" ${ARGN})
  if(NOT VRDMA_UNITY OR NOT TARGET ${target})  # without BUILD_TESTING there are no tests
    return()
  endif()
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
  get_target_property(sources ${target} SOURCES)
  set(folders "")
  foreach(source ${sources})
    get_source_file_property(group ${source} UNITY_GROUP)
    if(NOT group AND NOT source IN_LIST ARG_ALONE AND NOT source MATCHES "^[$]<")
      get_filename_component(file ${source} ABSOLUTE)
      file(RELATIVE_PATH file ${CMAKE_CURRENT_SOURCE_DIR} ${file})
      get_filename_component(folder ${file} DIRECTORY)
      string(MAKE_C_IDENTIFIER "files_${folder}" folder)
      list(APPEND folders ${folder})
      list(APPEND of_${folder} ${source})
    endif()
  endforeach()
  list(REMOVE_DUPLICATES folders)
  foreach(folder ${folders})
    list(LENGTH of_${folder} count)
    set(index 0)
    foreach(source ${of_${folder}})
      math(EXPR group "${index} * ((${count} + ${vrdma_unity_files} - 1) / ${vrdma_unity_files}) / ${count}")
      set_source_files_properties(${source} PROPERTIES UNITY_GROUP ${folder}_${group})
      math(EXPR index "${index} + 1")
    endforeach()
  endforeach()
endfunction()

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
  if(NOT TARGET vrdma_test_main)  # compiled once: doctest's implementation costs more than most tests
    add_library(vrdma_test_main OBJECT ${PROJECT_SOURCE_DIR}/tests/doctest_main.cpp)
    target_link_libraries(vrdma_test_main PRIVATE vrdma_flags)
    vrdma_quick_to_build(vrdma_test_main)
  endif()
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE ${ARG_LIBS} vrdma_flags vrdma_test_main)
  if(VRDMA_SANITIZE)  # else it tries the data path's templates as they are shipped
    vrdma_quick_to_build(${name})
  endif()
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/tests)
  add_test(NAME ${name} COMMAND ${name})
  set_tests_properties(${name} PROPERTIES TIMEOUT ${ARG_TIMEOUT} LABELS "${ARG_LABELS}")
  if("tsan" IN_LIST ARG_LABELS)  # what has threads of its own: all that ThreadSanitizer's preset needs to build
    set_tests_properties(${name} PROPERTIES ENVIRONMENT "TSAN_OPTIONS=halt_on_error=1:die_after_fork=0")
    if(NOT TARGET tsan_targets)
      add_custom_target(tsan_targets)
    endif()
    add_dependencies(tsan_targets ${name})
  endif()
endfunction()

# vrdma_fuzz(name SOURCES ... [LIBS ...]): a program with LLVMFuzzerTestOneInput(), and the test fuzz_<name>. With VRDMA_FUZZ it
# fuzzes for VRDMA_FUZZ_SECONDS (20) from its seeds in tests/fuzz/corpus/<name>; anywhere else it takes every seed once.
function(vrdma_fuzz name)
  cmake_parse_arguments(ARG "" "" "SOURCES;LIBS" ${ARGN})
  if(NOT BUILD_TESTING)
    return()
  endif()
  string(REGEX REPLACE "_fuzz$" "" test fuzz_${name})
  set(corpus ${PROJECT_SOURCE_DIR}/tests/fuzz/corpus/${name})
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE ${ARG_LIBS} vrdma_flags)
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/tests)
  if(VRDMA_FUZZ)
    target_link_options(${name} PRIVATE -fsanitize=fuzzer)
    add_test(NAME ${test} COMMAND ${PROJECT_SOURCE_DIR}/tests/fuzz/fuzz.sh $<TARGET_FILE:${name}> ${PROJECT_BINARY_DIR}/fuzz/${name} ${corpus})
    set_tests_properties(${test} PROPERTIES LABELS fuzz TIMEOUT 90000)  # fuzz.sh ends by itself
  else()
    target_sources(${name} PRIVATE ${PROJECT_SOURCE_DIR}/tests/fuzz/replay.cpp)
    add_test(NAME ${test} COMMAND ${name} ${corpus})
    set_tests_properties(${test} PROPERTIES LABELS fuzz TIMEOUT 120)
  endif()
endfunction()

# Tests that wait more than they compute, for time-outs above all: ./test runs twice as many of them at once as there are processors.
function(vrdma_waiting_tests)
  foreach(test ${ARGN})
    set_property(TEST ${test} APPEND PROPERTY LABELS waits)
    set_property(TEST ${test} PROPERTY PROCESSORS 1)
  endforeach()
endfunction()
