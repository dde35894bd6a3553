//! The reference of the command line, generated from the clap command.

use std::fmt::Write as _;

use crate::{command, vars};

const INTRODUCTION: &str = "\
# The command line: reference

The program generates this page: `zae-limiter COMMAND --help` prints the same text. A test compares
the page with the code; `ZAEL_UPDATE_REFERENCE=1 cargo test -p zae-limiter-cli --test reference`
updates it.

## Exit status

| status | meaning |
| ---: | --- |
| 0 | done, or admitted |
| 1 | error |
| 2 | wrong usage: an option, a name or an amount breaks a rule; nothing was done |
| 3 | the store is unavailable |
| 4 | not found |
| 5 | refused by a limit |

`acquire … -- COMMAND` exits with the command's own status, with 126 or 127 if the command cannot be
started, and with 128 plus the signal's number if a signal ended it.

## Environment

| variable | meaning |
| --- | --- |
";

/// The page, in Markdown.
pub fn reference() -> String {
    let mut page = INTRODUCTION.to_owned();
    for var in vars::all() {
        let _ = writeln!(page, "| `{}` | {} |", var.name, var.meaning);
    }
    page.push_str(
        "\n## Commands\n\nAll commands accept the global options of the first help text.\n",
    );
    let mut root = command().term_width(100);
    root.build();
    describe(&mut root, "", &mut page);
    page
}

fn describe(command: &mut clap::Command, parents: &str, page: &mut String) {
    let name = format!("{parents}{}", command.get_name());
    let help = command.render_long_help().to_string();
    let lines: Vec<&str> = help.lines().map(str::trim_end).collect();
    let _ = write!(page, "\n### {name}\n\n```text\n{}\n```\n", lines.join("\n").trim());
    for sub in command.get_subcommands() {
        // Global options appear in the first help text only.
        let mut own = sub.clone().mut_args(|arg| {
            let is_everywhere =
                arg.is_global_set() || matches!(arg.get_id().as_str(), "help" | "version");
            let is_hidden = arg.is_hide_set() || is_everywhere;
            arg.hide(is_hidden)
        });
        describe(&mut own, &format!("{name} "), page);
    }
}
