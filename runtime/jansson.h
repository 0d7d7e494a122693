// jansson beside runtime/json.h: both have a json_string. Ours writes a member; jansson's makes a value, which nobody
// here needs, since what we write goes through runtime/json.h. So jansson's is declared under another name.
#pragma once
#define json_string jansson_string
#include <jansson.h>
#undef json_string
