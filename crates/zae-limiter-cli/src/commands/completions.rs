//! `completions`

use clap::ValueEnum as _;
use clap_complete::Shell;
use serde::Serialize;

use crate::context::Context;
use crate::exit::ExitStatus;
use crate::failure::Failure;

const AFTER_HELP: &str = "\
To install the script for your user:
  bash   mkdir -p ~/.local/share/bash-completion/completions
         zae-limiter completions bash > ~/.local/share/bash-completion/completions/zae-limiter
  zsh    mkdir -p ~/.zfunc
         zae-limiter completions zsh > ~/.zfunc/_zae-limiter
         and in ~/.zshrc, before compinit:  fpath+=~/.zfunc
  fish   zae-limiter completions fish > ~/.config/fish/completions/zae-limiter.fish

To try it in this shell only:
  bash   source <(zae-limiter completions bash)
  fish   zae-limiter completions fish | source";

/// Arguments of `completions`.
#[derive(clap::Args, Debug)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct Args {
    /// Shell to complete in
    #[arg(value_enum)]
    shell: Shell,
}

#[derive(Serialize)]
struct CompletionsJson {
    shell: String,
    script: String,
}

#[expect(clippy::unnecessary_wraps, reason = "all commands have this signature")]
pub(crate) fn run(args: Args, context: &mut Context) -> Result<ExitStatus, Failure> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut crate::command(), "zae-limiter", &mut script);
    // In bash, clap_complete writes the dash of the program's name in two ways, so that completion
    // would stop after the first word (clap-rs/clap#6421).
    let script = String::from_utf8_lossy(&script).replace("zae__subcmd__limiter", "zae__limiter");
    if context.printer.is_json() {
        let shell = args.shell.to_possible_value().map(|value| value.get_name().to_owned());
        context.printer.json(&CompletionsJson { shell: shell.unwrap_or_default(), script });
    } else {
        context.printer.write(&script);
    }
    Ok(ExitStatus::Done)
}
