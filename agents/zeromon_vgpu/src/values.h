// Small values on a device: which are known, and what the host reads where they are not.
//
// A value is known if the host, a fill or a collective put its bytes there, or a kernel that is carried
// out here: fills, comparisons and concatenations of a few elements, which decide what a program does
// next. What any other kernel computes is unknown: the host reads the same bytes on each rank then, and
// never what an earlier tensor left at the address.
#pragma once
#include <cstddef>
#include <memory>

#include "device.h"

namespace vgpu {

constexpr std::size_t kLargestSmallRead = 4096;

// A kernel of unknown result is launched.
void forget_values();
// The host or a fill put bytes there; those of more than a MiB are not followed.
void note_written(const void* start, std::size_t bytes);
// A copy on the device: its target is as known as its source.
void note_copied(const void* to, const void* from, std::size_t bytes);
// What is read or copied before the next kernel of unknown result is believed to come from it.
void note_collective(std::size_t bytes);
// Of a kernel that is launched: what it does to small values, or null.
std::unique_ptr<Action> small_kernel(const char* name, unsigned blocks_y, void** args);
// The bytes that the host reads instead of those of the device, or null if it reads those. An integer
// of 8 bytes, such as a count, is 1, and a truth that an `all` or a test for finite values made is true:
// neither a division nor a guard against NaN then ends the run. Everything else is zero.
const char* stand_in_for(const void* start, std::size_t bytes, const char* last_kernel);

}  // namespace vgpu
