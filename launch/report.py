"""Write the report of runs, finished or running, as one HTML file.

    python launch/report.py RUN [RUN ...] [--out=FILE]

RUN is a work directory. A run writes its own RUN/report.html. Runs that differ only in their seed
form one curve, with the standard deviation as a band. FILE defaults to RUN/report.html for one run,
else report.html in the folder of the runs. --config.log.rollouts=1.0 records all responses.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - pip need not have checked it
    sys.exit(f"error: Python must be 3.11 or later, got {sys.version.split()[0]}")

import os
from pathlib import Path

from specrl_jax.command_line import cli


def parser() -> cli.Parser:
    """Return the command line."""
    parser = cli.Parser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a work directory")
    parser.add_argument("--out", type=Path, help="the file to write")
    return parser


def main() -> None:
    args, rest = parser().parse_known_args()
    cli.refuse(rest, vars(args))
    from specrl_jax.reports.report_page import FILE_NAME, write_report

    folder = Path(os.path.commonpath([run.absolute() for run in args.runs]))
    file = args.out or folder / FILE_NAME
    cli.check_folder("--out", args.out)
    write_report(args.runs, file)
    print(file)


if __name__ == "__main__":
    with cli.user_errors():
        main()
