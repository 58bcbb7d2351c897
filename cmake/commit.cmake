# Run at build time: writes OUTPUT, a header with the commit of SOURCE, and leaves it untouched
# where it says so already, so that nothing is compiled anew.
set(commit unknown)
find_program(GIT git)
if(GIT)
  execute_process(COMMAND ${GIT} -C ${SOURCE} rev-parse --show-cdup
    OUTPUT_VARIABLE above RESULT_VARIABLE failed ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE)
  # Not the commit of a repository that holds a copy of these sources somewhere inside.
  if(NOT failed AND above STREQUAL "")
    execute_process(
      COMMAND ${GIT} --no-optional-locks -C ${SOURCE} describe --always --dirty --abbrev=7 --exclude=*
      OUTPUT_VARIABLE described RESULT_VARIABLE failed ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE)
    if(NOT failed)
      set(commit ${described})
    endif()
  endif()
endif()
set(text "#pragma once\n#define LEEWAY_COMMIT \"${commit}\"\n")
if(EXISTS ${OUTPUT})
  file(READ ${OUTPUT} before)
endif()
if(NOT text STREQUAL "${before}")
  file(WRITE ${OUTPUT} "${text}")
endif()
