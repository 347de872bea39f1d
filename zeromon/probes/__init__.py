"""Readings of a process and its machine from outside: /proc, cgroups, disks, network, devices."""
