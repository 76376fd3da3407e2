#pragma once
#include "emulation.h"
