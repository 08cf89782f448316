// What `Problem` looks like here, for ../build.py to compare with what it has.
#include "problem.h"

extern "C" const char* problem_fields() {
#define FIELD(name) #name " "
  return PROBLEM_FIELDS(FIELD);
#undef FIELD
}

extern "C" Index problem_bytes() { return sizeof(Problem); }
