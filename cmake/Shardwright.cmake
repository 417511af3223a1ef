# Functions by which every folder declares its targets. Sources are always listed, one per line and
# sorted, so that two people who add a file get a trivial merge and a forgotten file is a link error.

# Warnings of our own targets; linked PRIVATE, so that they never reach a user of the library.
add_library(sw_warnings INTERFACE)
target_compile_options(sw_warnings INTERFACE
  -Wall -Wextra -Wpedantic -Wconversion -Wswitch
  # In a unity build a local name may hide one of another file, and a struct may hold another file's local type.
  # What g++ 12 inlines there also makes it warn of overlapping copies inside of std::string (GCC's bug 105651).
  $<IF:$<BOOL:$<TARGET_PROPERTY:UNITY_BUILD>>,$<$<CXX_COMPILER_ID:GNU>:-Wno-subobject-linkage;-Wno-restrict>,-Wshadow>
  $<$<BOOL:${SHARDWRIGHT_WERROR}>:-Werror>)

# sw_library(NAME [SOURCES a.cc ...] [HEADERS a.h ...] [DEPS t ...] [PRIVATE_DEPS t ...])
#
# A static library of one folder. Paths are relative to the folder. HEADERS form a header set rooted at
# the repository, which gives users the include path and lets the target all_verify_interface_header_sets
# compile every header alone. A folder without sources becomes an INTERFACE library.
function(sw_library name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "SOURCES;HEADERS;DEPS;PRIVATE_DEPS")
  if(arg_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "sw_library(${name}): unknown arguments ${arg_UNPARSED_ARGUMENTS}")
  endif()
  if(arg_SOURCES)
    add_library(${name} STATIC ${arg_SOURCES})
    set(scope PUBLIC)
    # Those are headers only, or options: an installed library does not need them.
    set(build_only sw_warnings nlohmann_json::nlohmann_json CLI11::CLI11 Boost::headers)
    set(private_deps sw_warnings)
    foreach(dep IN LISTS arg_PRIVATE_DEPS)
      list(APPEND private_deps "${dep}")
    endforeach()
    foreach(dep IN LISTS build_only)
      list(TRANSFORM private_deps REPLACE "^${dep}$" "$<BUILD_INTERFACE:${dep}>")
    endforeach()
    target_link_libraries(${name} PRIVATE ${private_deps})
    set_target_properties(${name} PROPERTIES CXX_EXTENSIONS OFF)
  else()
    add_library(${name} INTERFACE)
    set(scope INTERFACE)
  endif()
  target_compile_features(${name} ${scope} cxx_std_20)
  target_include_directories(${name} ${scope} "$<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}>")
  target_link_libraries(${name} ${scope} ${arg_DEPS})
  if(arg_HEADERS)
    target_sources(${name} ${scope} FILE_SET HEADERS
      BASE_DIRS "${PROJECT_SOURCE_DIR}" FILES ${arg_HEADERS})
    set_target_properties(${name} PROPERTIES VERIFY_INTERFACE_HEADER_SETS ON)
  endif()
endfunction()

# sw_executable(NAME [SOURCES a.cc ...] [DEPS t ...]): a program in the root of the build tree. Without
# sources there is no target.
function(sw_executable name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "SOURCES;DEPS")
  if(arg_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "sw_executable(${name}): unknown arguments ${arg_UNPARSED_ARGUMENTS}")
  endif()
  if(NOT arg_SOURCES)
    return()
  endif()
  add_executable(${name} ${arg_SOURCES})
  target_compile_features(${name} PRIVATE cxx_std_20)
  target_include_directories(${name} PRIVATE "${PROJECT_SOURCE_DIR}")
  target_link_libraries(${name} PRIVATE sw_warnings ${arg_DEPS})
  set_target_properties(${name} PROPERTIES
    CXX_EXTENSIONS OFF
    RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}")
endfunction()

# sw_test_properties(NAME LABELS ...): labels, time limit and the meaning of a skip, for any ctest entry.
#
# LABELS: fast (scripts/test.sh), ci (.ci/run; every fast test is a ci test too) or deep (scripts/deep.sh).
# A test that lacks its hardware or tool exits with 77 (tests/skip.h); ctest then reports it as skipped, and
# .ci/run compares the skipped tests with tests/expected_skips.txt.
# Further labels: threads (starts threads; scripts/deep.sh repeats it under ThreadSanitizer),
# unsanitized (.ci/run does not repeat it under sanitizers, which takes too long; scripts/deep.sh does) and
# engine (needs what scripts/web.sh builds; .ci/run runs it, too, where the time is left).
function(sw_test_properties name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "TIMEOUT" "LABELS")
  if(NOT arg_LABELS)
    message(FATAL_ERROR "sw_test(${name}): LABELS must name fast, ci or deep")
  endif()
  foreach(label IN LISTS arg_LABELS)
    if(NOT label MATCHES "^(fast|ci|deep|threads|unsanitized|engine)$")
      message(FATAL_ERROR "sw_test(${name}): label ${label} is not one of fast, ci, deep, threads, unsanitized, engine")
    endif()
  endforeach()
  # .ci/run builds every such test by its name under sanitizers; a script has no target of that name.
  if("fast" IN_LIST arg_LABELS AND NOT "unsanitized" IN_LIST arg_LABELS AND NOT TARGET ${name})
    message(FATAL_ERROR "sw_test_properties(${name}): a fast test that is no program needs the label unsanitized")
  endif()
  if("fast" IN_LIST arg_LABELS AND NOT "ci" IN_LIST arg_LABELS)
    list(APPEND arg_LABELS ci)
  endif()
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 600)  # Ample: the sanitizers cost a factor of ten on a busy machine.
  endif()
  set_tests_properties(${name} PROPERTIES
    LABELS "${arg_LABELS}"
    TIMEOUT ${arg_TIMEOUT}
    SKIP_RETURN_CODE 77)
endfunction()

# sw_test(NAME LABELS fast|ci|deep [threads] [SOURCES a_test.cc ...] [DEPS t ...] [TIMEOUT seconds])
#
# One doctest program and its ctest entry. It runs in tests/, so that it opens data/... by relative path.
# The label threads marks tests that start threads; scripts/deep.sh repeats those under ThreadSanitizer.
function(sw_test name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "TIMEOUT" "LABELS;SOURCES;DEPS")
  if(arg_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "sw_test(${name}): unknown arguments ${arg_UNPARSED_ARGUMENTS}")
  endif()
  if(NOT arg_SOURCES)
    return()
  endif()
  add_executable(${name} ${arg_SOURCES})
  target_compile_features(${name} PRIVATE cxx_std_20)
  target_include_directories(${name} PRIVATE "${PROJECT_SOURCE_DIR}")
  target_link_libraries(${name} PRIVATE sw_warnings sw_doctest_main ${arg_DEPS})
  # The libraries do the work; optimizing the tests themselves costs more time than it saves.
  target_compile_options(${name} PRIVATE $<$<CONFIG:Release>:-O1> $<$<CONFIG:Debug>:-O0>)
  set_target_properties(${name} PROPERTIES CXX_EXTENSIONS OFF)
  add_test(NAME ${name} COMMAND ${name} WORKING_DIRECTORY "${PROJECT_SOURCE_DIR}/tests")
  sw_test_properties(${name} LABELS ${arg_LABELS} TIMEOUT "${arg_TIMEOUT}")
endfunction()

# sw_package_test(NAME SCRIPT LABELS ci|deep [PROGRAM] [TIMEOUT seconds])
#
# A Python script that compares us with packages of tests/requirements.txt and exits with 77 where one is missing. It runs in the
# virtual environment of scripts/install-python.sh, if that is there when CMake configures. PROGRAM: its first argument is the
# path of shardwright.
find_program(SHARDWRIGHT_TEST_PYTHON python PATHS "${PROJECT_SOURCE_DIR}/build/venv/bin" NO_DEFAULT_PATH)
function(sw_package_test name script)
  cmake_parse_arguments(PARSE_ARGV 2 arg "PROGRAM" "TIMEOUT" "LABELS;ARGS")
  set(python "${Python3_EXECUTABLE}")
  if(SHARDWRIGHT_TEST_PYTHON)
    set(python "${SHARDWRIGHT_TEST_PYTHON}")
  endif()
  set(program)
  if(arg_PROGRAM)
    set(program "$<TARGET_FILE:shardwright>")
  endif()
  add_test(NAME ${name}
    COMMAND "${python}" -B "${CMAKE_CURRENT_SOURCE_DIR}/${script}" ${program} ${arg_ARGS}
    WORKING_DIRECTORY "${PROJECT_SOURCE_DIR}/tests")
  sw_test_properties(${name} LABELS ${arg_LABELS} TIMEOUT "${arg_TIMEOUT}")
endfunction()

# sw_bench(NAME [SOURCES a.cc ...] [DEPS t ...]): a Google Benchmark program; nothing runs it by itself.
function(sw_bench name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "SOURCES;DEPS")
  if(arg_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "sw_bench(${name}): unknown arguments ${arg_UNPARSED_ARGUMENTS}")
  endif()
  if(NOT arg_SOURCES)
    return()
  endif()
  add_executable(${name} ${arg_SOURCES})
  target_compile_features(${name} PRIVATE cxx_std_20)
  target_include_directories(${name} PRIVATE "${PROJECT_SOURCE_DIR}")
  target_link_libraries(${name} PRIVATE sw_warnings benchmark::benchmark ${arg_DEPS})
  set_target_properties(${name} PROPERTIES CXX_EXTENSIONS OFF)
endfunction()

# sw_embed(TARGET SYMBOL [FOLDER folder] FILES a.json ...)
#
# Puts text files into the library TARGET, so that the program needs no data folder beside it. For the
# symbol model_zoo in folder models, `#include "models/model_zoo.h"` declares
#     std::span<const EmbeddedFile> EmbeddedModelZoo();   // core/embedded.h; files in the order listed
# Paths are relative to the folder: that of the CMakeLists.txt, or FOLDER. Editing a file rebuilds the library.
function(sw_embed target symbol)
  cmake_parse_arguments(PARSE_ARGV 2 arg "" "FOLDER" "FILES")
  if(arg_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "sw_embed(${symbol}): unknown arguments ${arg_UNPARSED_ARGUMENTS}")
  endif()
  cmake_path(RELATIVE_PATH CMAKE_CURRENT_SOURCE_DIR
    BASE_DIRECTORY "${PROJECT_SOURCE_DIR}" OUTPUT_VARIABLE folder)
  if(arg_FOLDER)
    set(folder "${arg_FOLDER}")
  endif()
  set(root "${PROJECT_BINARY_DIR}/generated")
  set(stem "${root}/${folder}/${symbol}")
  set(paths)
  foreach(file IN LISTS arg_FILES)
    cmake_path(IS_ABSOLUTE file is_absolute)
    if(is_absolute)
      list(APPEND paths "${file}")
    else()
      list(APPEND paths "${folder}/${file}")
    endif()
  endforeach()
  # The list travels in a file: a command line of hundreds of names would be long and needs quoting.
  string(REPLACE ";" "\n" lines "${paths}")
  file(CONFIGURE OUTPUT "${stem}.list" CONTENT "${lines}\n" @ONLY)
  set(inputs)
  foreach(path IN LISTS paths)
    cmake_path(ABSOLUTE_PATH path BASE_DIRECTORY "${PROJECT_SOURCE_DIR}" OUTPUT_VARIABLE input)
    list(APPEND inputs "${input}")
  endforeach()
  set(script "${PROJECT_SOURCE_DIR}/cmake/embed.cmake")
  add_custom_command(
    OUTPUT "${stem}.cc" "${stem}.h"
    COMMAND "${CMAKE_COMMAND}" "-DROOT=${PROJECT_SOURCE_DIR}" "-DLIST=${stem}.list"
            "-DSTEM=${stem}" "-DHEADER=${folder}/${symbol}.h" "-DSYMBOL=${symbol}" -P "${script}"
    DEPENDS "${script}" "${stem}.list" ${inputs}
    COMMENT "Embedding ${folder} data: ${symbol}"
    VERBATIM)
  # Clang's -Wpedantic warns of a literal above 64 KiB; both supported compilers accept any length.
  set_source_files_properties("${stem}.cc" PROPERTIES COMPILE_OPTIONS "-Wno-overlength-strings")
  target_sources(${target} PRIVATE "${stem}.cc" "${stem}.h")
  target_include_directories(${target} PRIVATE "${root}")
endfunction()

# sw_fields(TARGET TABLE.json HEADER.h [LISTS LISTS.h] [FOLDER FOLDER])
#
# A table of fields (cmake/fields.cmake says what a row has) becomes the header `folder/HEADER.h`, installed with those of the
# target: structs, enumerators and their words, and the lists of fields. With LISTS the lists have a header of their own. FOLDER
# is the table's, if not this one. The target TARGET_fields writes them, for those who compile against the headers without the
# library.
function(sw_fields target table header)
  cmake_parse_arguments(PARSE_ARGV 3 arg "" "LISTS;FOLDER" "")
  cmake_path(RELATIVE_PATH CMAKE_CURRENT_SOURCE_DIR
    BASE_DIRECTORY "${PROJECT_SOURCE_DIR}" OUTPUT_VARIABLE folder)
  if(arg_FOLDER)
    set(folder "${arg_FOLDER}")
  endif()
  set(root "${PROJECT_BINARY_DIR}/generated")
  set(outputs "${root}/${folder}/${header}")
  set(lists)
  if(arg_LISTS)
    list(APPEND outputs "${root}/${folder}/${arg_LISTS}")
    set(lists "-DLISTS=${root}/${folder}/${arg_LISTS}")
  endif()
  set(script "${PROJECT_SOURCE_DIR}/cmake/fields.cmake")
  set(path "${PROJECT_SOURCE_DIR}/${folder}/${table}")
  add_custom_command(
    OUTPUT ${outputs}
    COMMAND "${CMAKE_COMMAND}" "-DTABLE=${path}" "-DOUTPUT=${root}/${folder}/${header}" ${lists} -P "${script}"
    DEPENDS "${script}" "${path}"
    COMMENT "Writing the fields of ${folder}/${table}"
    VERBATIM)
  target_sources(${target} PUBLIC FILE_SET generated TYPE HEADERS BASE_DIRS "${root}" FILES ${outputs})
  add_custom_target(${target}_fields DEPENDS ${outputs})
  add_dependencies(${target} ${target}_fields)
endfunction()
