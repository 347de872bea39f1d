"""What runs in the target, in the thread that was injected. ARGUMENTS is put in front of it.

It loads the agent from where we have it, whatever the target's environment has, and answers by a file.
Nothing is imported that the target has not imported already, until that is known to be torch:
`threading` would take this thread for the main one. Old syntax on purpose: this runs in whatever Python
the target is.
"""

import sys

ARGUMENTS = globals()["ARGUMENTS"]


def answer(facts):
    import os

    path = ARGUMENTS["answer"]
    with open(path + ".part", "w") as file:
        file.write(repr(facts))
    os.rename(path + ".part", path)


def refusal():
    """Why this process cannot be joined; None when it can."""
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
    """Loads our packages by their path, past the target's sys.path."""
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
        import zeromon_agents.join as agent

        if ARGUMENTS["leave"]:
            facts = agent.leave()
        else:
            facts = agent.join(**ARGUMENTS["join"])
    except BaseException as error:
        facts = {
            "refused": "%s: %s" % (type(error).__name__, error),
            "hint": getattr(error, "hint", ""),
        }
    answer(facts)


def named_as(name):
    """The name that the kernel has for this thread; new threads inherit it."""
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

    with open("/proc/self/comm") as file:
        was = named_as(file.read().strip())
    threading.Thread(target=work, name="zeromon-join", daemon=True).start()
    named_as(was)


main()
