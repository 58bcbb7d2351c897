#include "orchestrator/loop.h"
