from .signals import signals_end_process

with signals_end_process():  # modules that are imported turn errors in them into their own
    import gc
    import os
    import sys

    from .cli import read_arguments, run
    from .compatibility import import_paddle_and_ppdiffusers

    options = read_arguments(sys.argv[1:])  # --help, --version and wrong options end here
    if options.command == "export":  # Paddle 3 logs a warning about an argument that its own operators pass each other
        os.environ.setdefault("GLOG_minloglevel", "2")  # errors and above; read when Paddle is imported
    if getattr(options, "needs_paddle", True):
        import_paddle_and_ppdiffusers()

        from .api import install_methods

        install_methods()
        gc.freeze()  # what is imported stays, so that a collection for each program takes no time
sys.exit(run(options, sys.argv[1:]))
