"""The code that runs in the target process, in the injected thread. The loader prepends ARGUMENTS.

The payload loads the agent from the loader's own packages, whatever the target's environment has, and
writes its answer to a file. It imports nothing that the target has not imported, until it has checked
that the target runs torch: a first import of `threading` would register this thread as the main one.
The syntax is old on purpose, because the target may run any Python.
"""

import sys

ARGUMENTS = globals()["ARGUMENTS"]


def answer(facts):
    import os

    path = ARGUMENTS["answer"]
    with open(path + ".part", "w") as file:
        file.write(repr(facts))
    # The loader reads the answer as soon as it exists: it must be whole by then
    os.rename(path + ".part", path)


def refusal():
    """Returns why the agent cannot work in this process, and a way out; None when it can."""
    torch = sys.modules.get("torch")
    gil = getattr(sys, "_is_gil_enabled", None)
    if sys.version_info < (3, 10):
        return "its Python is %d.%d" % sys.version_info[:2], "Python 3.10 or later is needed."
    if gil is not None and not gil():
        return "its Python runs without the interpreter's lock", "The hooks are not made for that."
    if torch is None or "threading" not in sys.modules:
        return "it has not loaded torch", "Give the pid of a rank, or of its launcher."
    if getattr(torch.__spec__, "_initializing", False):
        return "it is still loading torch", "Try again in a moment."
    return None


def load():
    """Loads zeromon's packages by their path; sys.path of the target stays as it is."""
    import importlib.machinery
    import importlib.util

    for name, folder in ARGUMENTS["packages"]:
        if name in sys.modules:
            continue
        spec = importlib.machinery.PathFinder.find_spec(name, [folder])
        if spec is None:
            raise ImportError("no %s in %s" % (name, folder))
        package = importlib.util.module_from_spec(spec)
        sys.modules[name] = package
        spec.loader.exec_module(package)


def work():
    try:
        load()
        import zeromon_agents.runtime.attached as agent

        if ARGUMENTS["leave"]:
            facts = agent.detach()
        else:
            facts = agent.attach(**ARGUMENTS["attach"])
    except BaseException as error:
        facts = {"refused": "%s: %s" % (type(error).__name__, error), "hint": getattr(error, "hint", "")}
    answer(facts)


def named_as(name):
    """Sets the kernel's name of this thread, which new threads inherit; returns the name before."""
    with open("/proc/thread-self/comm", "r+") as file:
        was = file.read().strip()
        file.seek(0)
        file.write(name)
    return was


def main():
    why = refusal()
    if why is not None:
        answer({"refused": why[0], "hint": why[1]})
        return
    import threading

    # A new thread inherits the name: the loader would take it for an injected one that still waits
    with open("/proc/self/comm") as file:
        was = named_as(file.read().strip())
    # The injected code may run in the main thread, which must not wait while the agent loads
    threading.Thread(target=work, name="zeromon-attach", daemon=True).start()
    named_as(was)


main()
