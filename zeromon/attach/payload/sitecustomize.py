"""zeromon's start-up shim: the first sitecustomize of every Python that `zeromon run` starts.

It takes its folder off sys.path, arms a one-shot finder for torch.distributed.distributed_c10d (which
notes when the import of torch begins), and then runs the sitecustomize that it shadows. A process
without torch pays 0.3 ms; torch is never loaded into a process that would not have loaded it. Nothing in
here may raise or print.
Old syntax on purpose: this runs in whatever Python the job starts.
"""

import sys


def _chain(here):
    import os

    keep = [p for p in sys.path if os.path.normcase(os.path.abspath(p or ".")) != here]
    if len(keep) != len(sys.path):
        sys.path[:] = keep
    # Else the import below finds this very module, and the user's own never runs
    me = sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize  # noqa: F401  the user's; its own errors show as they would without us
    except ImportError as error:
        # Only its absence is silent: an ImportError within the user's file must show
        if getattr(error, "name", None) != "sitecustomize":
            raise
        if me is not None:
            sys.modules["sitecustomize"] = me


def _stay_first(here):
    """Another sitecustomize may have put its own folder before ours, as OpenTelemetry's does."""
    import os

    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    ours = [p for p in given if os.path.normcase(p) == here]
    if ours and given[0] != ours[0]:
        os.environ["PYTHONPATH"] = os.pathsep.join(ours[:1] + [p for p in given if p not in ours])


def _arm():
    import os

    if os.environ.get("ZEROMON_SHIM") != "1" or sys.version_info < (3, 10):
        return
    if os.environ.get("VGPU_LIBRARIES"):  # a preflight: torch gets devices that are modelled
        try:
            _load_package("zeromon_vgpu", "ZEROMON_AGENTS")
            import zeromon_vgpu.startup

            zeromon_vgpu.startup.begin_at_startup()
        except BaseException as error:  # without them it would train on the devices of this machine
            _say("zeromon: this preflight has no virtual device (%r)" % (error,))
            os._exit(1)
    import time

    name = "torch.distributed.distributed_c10d"
    torch_from_ns = [0]

    class Finder(object):
        """Lets the other finders find `name`, adds our call to its load, and goes."""

        @staticmethod
        def find_spec(fullname, path=None, target=None):
            if fullname == "torch":
                torch_from_ns[0] = time.monotonic_ns()
            if fullname != name:
                return None
            try:
                sys.meta_path.remove(Finder)
            except ValueError:
                return None
            for finder in list(sys.meta_path):
                find = getattr(finder, "find_spec", None)
                spec = find(fullname, path, target) if find else None
                if spec is not None:
                    break
            else:
                return None
            try:
                original = spec.loader.exec_module

                def exec_module(module):
                    # Outside the try: an error of torch's own import must reach the script
                    original(module)
                    try:
                        # From where `zeromon run` has it, whatever this environment has installed
                        _load_package("zeromon", "ZEROMON_CORE")
                        _load_package("zeromon_agents", "ZEROMON_AGENTS")
                        import zeromon_agents.runtime.bootstrap

                        zeromon_agents.runtime.bootstrap.install(module, torch_from_ns[0])
                    except BaseException as error:  # never the user's problem
                        _say("zeromon: this process is not watched (%r)" % (error,))

                # A loader may allow no new attribute: the import then goes on without the agent
                spec.loader.exec_module = exec_module
            except Exception:
                pass
            return spec

    sys.meta_path.insert(0, Finder)


def _load_package(name, variable):
    import importlib.machinery
    import importlib.util
    import os

    folder = os.environ.get(variable)
    if name in sys.modules or not folder:
        return
    spec = importlib.machinery.PathFinder.find_spec(name, [folder])
    if spec is None:
        raise ImportError("no %s in %s" % (name, folder))
    package = importlib.util.module_from_spec(spec)
    # Before it runs: its modules import each other by this name
    sys.modules[name] = package
    spec.loader.exec_module(package)


def _say(text):
    try:
        import os

        # Not sys.stderr, which a script may have replaced or closed
        os.write(2, (text + "\n").encode())
    except Exception:
        pass


def _main():
    import os

    here = os.path.normcase(os.path.dirname(os.path.abspath(__file__)))
    try:
        _arm()
    except Exception:
        pass
    try:
        _chain(here)  # outside the guard: errors in the user's own sitecustomize stay visible
    finally:
        _stay_first(here)


_main()
