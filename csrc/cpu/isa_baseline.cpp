// The kernels compiled for what every processor of the target has.
#include <cmath>
#include <cstdint>
#include <cstring>

#define FUSEDACCUM_ISA baseline
#include "table.h"

const fusedaccum::Kernels fusedaccum::kBaseline = fusedaccum::baseline::table("baseline");
