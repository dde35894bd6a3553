//! What the command line looks like.

use std::ffi::OsString;

use clap::builder::styling::{AnsiColor, Styles};
use clap::error::ErrorKind;
use clap::{Args, Parser, Subcommand};

use crate::commands;
use crate::grammar;
use crate::printer::{Color, Output};

const ABOUT: &str = "A rate limiter for LLM gateways and APIs";

const LONG_ABOUT: &str = "\
A rate limiter for LLM gateways and APIs.

Checks a call against several limits at once, takes an estimate up front and settles for the \
actual cost. Limits and balances live in a store, and all processes that share the store share \
one budget.";

const AFTER_HELP: &str = "\
Examples:
  zae-limiter demo                                       watch it work, for half a minute
  zae-limiter resource set-defaults gpt-4 -l rpm:100 -l tpm:10000
  zae-limiter acquire key-1 gpt-4 -c rpm:1 -c tpm:500    exit status 0: go; 5: wait
  zae-limiter available key-1 gpt-4

Limits are written name:rate[/period][:burst]: rpm:100, tpm:10000/min:15000, uploads:3/5min.

Exit status: 0 done or admitted, 1 error, 2 wrong usage, 3 the store did not answer,
4 not found, 5 refused by a limit.";

const STYLES: Styles = Styles::styled()
    .header(AnsiColor::Green.on_default().bold())
    .usage(AnsiColor::Green.on_default().bold())
    .literal(AnsiColor::Cyan.on_default().bold())
    .placeholder(AnsiColor::Cyan.on_default());

/// The whole command line.
#[derive(Debug, Parser)]
#[command(
    name = "zae-limiter",
    version,
    about = ABOUT,
    long_about = LONG_ABOUT,
    after_help = AFTER_HELP,
    styles = STYLES,
    arg_required_else_help = true,
    disable_help_subcommand = true,
    propagate_version = true,
    max_term_width = 100,
)]
pub(crate) struct Cli {
    /// Options of every command.
    #[command(flatten)]
    pub globals: Globals,
    /// The command to run.
    #[command(subcommand)]
    pub command: Command,
}

/// Options of every command.
#[derive(Args, Debug)]
#[command(next_help_heading = "Global options")]
pub(crate) struct Globals {
    /// Store of limits and balances: sqlite:FILE, sqlite:FILE?durability=full, dynamodb:TABLE or
    /// memory: [env: ZAEL_STORE] [default: a SQLite file in your data directory]
    #[arg(long, global = true, value_name = "URL", value_parser = grammar::store_url)]
    pub store: Option<String>,

    /// Short for --store dynamodb:STACK
    #[arg(
        id = "stack", short = 'n', long = "name", global = true, value_name = "STACK",
        value_parser = grammar::stack_name, conflicts_with = "store",
    )]
    pub name: Option<zae_limiter::model::StackName>,

    /// AWS region of the stack
    #[arg(
        long, global = true, value_name = "REGION", conflicts_with = "store",
        value_parser = grammar::region,
    )]
    pub region: Option<String>,

    /// URL of a DynamoDB endpoint other than that of AWS
    #[arg(
        long, global = true, value_name = "URL", conflicts_with = "store",
        value_parser = grammar::endpoint_url,
    )]
    pub endpoint_url: Option<String>,

    /// Namespace to work in [env: ZAEL_NAMESPACE] [default: default]
    #[arg(
        short = 'N', long, global = true, value_name = "NAME",
        value_parser = grammar::namespace_name,
    )]
    pub namespace: Option<zae_limiter::model::NamespaceName>,

    /// Output format
    #[arg(short, long, global = true, value_enum, default_value_t, value_name = "FORMAT")]
    pub output: Output,

    /// When to use colours
    #[arg(long, global = true, value_enum, default_value_t, value_name = "WHEN")]
    pub color: Color,

    /// Print more detail on stderr
    #[arg(short, long, global = true)]
    pub verbose: bool,

    /// Print data and errors only
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    pub quiet: bool,
}

/// All commands.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Take tokens and print the status of every limit
    Acquire(commands::acquire::Args),
    /// Show the available tokens without taking any
    Available(commands::available::Args),
    /// Manage entities and their limits
    Entity(commands::entity::Args),
    /// Manage the default limits of resources, and show the remaining capacity
    Resource(commands::resource::Args),
    /// Manage the default limits of all resources, and the policy for an unavailable store
    System(commands::system::Args),
    /// Manage namespaces, which separate limiters that share a store
    Namespace(commands::namespace::Args),
    /// Find and remove leftovers of purged namespaces and deleted entities
    Sweep(commands::sweep::Args),
    /// Show usage by hour, day or month
    Usage(commands::usage::Args),
    /// Show who changed what, and when
    Audit(commands::audit::Args),
    #[cfg(feature = "aws")]
    /// Run the aggregator on the stream of a DynamoDB table: usage, refills, archived audit events
    Aggregate(commands::aggregate::Args),
    #[cfg(feature = "aws")]
    /// Deploy a stack into an AWS account, or change its options
    Deploy(commands::deploy::Args),
    #[cfg(feature = "aws")]
    /// Delete a stack
    Delete(commands::delete::Args),
    #[cfg(feature = "aws")]
    /// Show the status of a stack
    Status(commands::status::Args),
    #[cfg(feature = "aws")]
    /// List the stacks of the account and region
    List(commands::list::Args),
    #[cfg(feature = "aws")]
    /// Upgrade a stack to this release and keep its options
    Upgrade(commands::upgrade::Args),
    #[cfg(feature = "aws")]
    /// Check whether the releases of program, stack, aggregator and table are compatible
    Check(commands::check::Args),
    #[cfg(feature = "aws")]
    /// Print the stack's CloudFormation template
    CfnTemplate(commands::cfn_template::Args),
    #[cfg(feature = "aws")]
    /// Write the aggregator as a zip file for Lambda
    LambdaExport(commands::lambda_export::Args),
    #[cfg(feature = "aws")]
    /// Run a DynamoDB endpoint on this machine: no Docker, no Java, no account
    Local(commands::local::Args),
    /// Print a shell script that completes commands and options
    Completions(commands::completions::Args),
    /// Measure a store under load: acquires per second, latency, over-admission check
    Bench(commands::bench::Args),
    /// Simulate a busy gateway for half a minute: live figures, a chart, over-admission check
    Demo(commands::demo::Args),
    /// Print the version
    Version(commands::version::Args),
}

impl Cli {
    /// Parses the arguments that follow the program's name.
    ///
    /// # Errors
    ///
    /// clap's error for wrong usage. clap also reports `--help` and `--version` as an error.
    pub(crate) fn read(args: &[OsString]) -> Result<Self, clap::Error> {
        let name = OsString::from("zae-limiter");
        let parse = |args: &[OsString]| Self::try_parse_from(std::iter::once(&name).chain(args));
        parse(args).or_else(|error| match file_as_output(args) {
            Some(args) if error.kind() == ErrorKind::InvalidValue => parse(&args),
            _ => Err(error),
        })
    }
}

/// The commands whose `--output` is a file in the Python original.
const WRITERS: [&str; 2] = ["cfn-template", "lambda-export"];

/// The arguments with `--output FILE`, as the Python original has it, replaced by `FILE`. `None` if they are not
/// those of such a command. Here `--output` is the format, with every command.
fn file_as_output(args: &[OsString]) -> Option<Vec<OsString>> {
    let is_writer = |arg: &OsString| WRITERS.iter().any(|name| arg == name);
    if !args.iter().any(is_writer) {
        return None;
    }
    let file = peek_option(args, "--output", Some("-o"))?;
    let is_option = |arg: &OsString| {
        let arg = arg.to_string_lossy();
        arg.starts_with("--output") || (arg.starts_with("-o") && !arg.starts_with("--"))
    };
    let at = args.iter().position(is_option)?;
    let is_separate = args[at] == "--output" || args[at] == "-o";
    let mut args = args.to_vec();
    args.drain(at..=at + usize::from(is_separate));
    args.push(file.into());
    Some(args)
}

/// The value of a global option in arguments that clap may reject: the error about them must
/// still have the requested format and colour.
pub(crate) fn peek_option(args: &[OsString], long: &str, short: Option<&str>) -> Option<String> {
    let mut args = args.iter().map(|arg| arg.to_string_lossy()).take_while(|arg| arg != "--");
    while let Some(arg) = args.next() {
        if arg == long || Some(arg.as_ref()) == short {
            return args.next().map(|value| value.into_owned());
        }
        let value = arg.strip_prefix(long).and_then(|rest| rest.strip_prefix('='));
        let value = value.or_else(|| {
            let attached = arg.strip_prefix(short?)?;
            (!arg.starts_with("--")).then(|| attached.strip_prefix('=').unwrap_or(attached))
        });
        if let Some(value) = value {
            return Some(value.to_owned());
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    /// All names of an argument: its id, `-x`, `--long`, and the aliases.
    fn names(arg: &clap::Arg) -> Vec<String> {
        let shorts = arg.get_short_and_visible_aliases().unwrap_or_default();
        let longs = arg.get_long_and_visible_aliases().unwrap_or_default();
        let hidden = arg.get_all_aliases().unwrap_or_default();
        let shorts = shorts.into_iter().map(|short| format!("-{short}"));
        let longs = longs.into_iter().chain(hidden).map(|long| format!("--{long}"));
        std::iter::once(arg.get_id().to_string()).chain(shorts).chain(longs).collect()
    }

    /// What the arguments of all commands have in common with the global ones. clap confuses arguments with
    /// equal ids, and notices only when the command is used.
    fn hidden(command: &clap::Command) -> Vec<String> {
        fn collect(command: &clap::Command, globals: &[String], found: &mut Vec<String>) {
            for sub in command.get_subcommands() {
                let own = sub.get_arguments().filter(|arg| !arg.is_global_set()).flat_map(names);
                let hidden = own.filter(|name| globals.contains(name));
                found.extend(hidden.map(|name| format!("{} {name}", sub.get_name())));
                collect(sub, globals, found);
            }
        }
        let globals = command.get_arguments().filter(|arg| arg.is_global_set());
        let globals: Vec<String> = globals.flat_map(names).collect();
        assert!(globals.contains(&"--output".to_owned()) && globals.contains(&"-o".to_owned()));
        let mut found = Vec::new();
        collect(command, &globals, &mut found);
        found
    }

    #[test]
    fn no_command_hides_a_global_option() {
        let command = Cli::command();
        assert_eq!(hidden(&command), Vec::<String>::new());
        command.debug_assert();
        // Under another id it is still the same option.
        let export = clap::Command::new("export")
            .arg(clap::Arg::new("file").long("output").short('o').alias("region"));
        let found = hidden(&Cli::command().subcommand(export));
        assert_eq!(found, ["export -o", "export --output", "export --region"]);
    }

    fn parsed(line: &str) -> Result<Cli, clap::Error> {
        Cli::read(&line.split(' ').map(OsString::from).collect::<Vec<_>>())
    }

    #[test]
    fn command_lines_of_the_python_original_are_understood() {
        for line in [
            "lambda-export --output lambda.zip",
            "lambda-export -o lambda.zip",
            "lambda-export --output=lambda.zip --force",
            "lambda-export -olambda.zip",
            "lambda-export -f",
            "cfn-template --output template.yaml",
            "deploy -n a --iam --create-iam-roles",
            "deploy -n a --no-iam --no-create-iam-roles --aggregator-role-arn x",
            "deploy -n a --enable-aggregator --enable-alarms --enable-audit-archival --wait",
            "deploy -n a --no-tracing --no-deletion-protection",
            "deploy -n a -t team=search",
        ] {
            assert!(parsed(line).is_ok(), "{line}: {}", parsed(line).expect_err(line));
        }
        for (line, file, output) in [
            ("lambda-export --output a.zip", "a.zip", Output::Table),
            ("lambda-export -o a.zip -o json", "a.zip", Output::Json),
            ("lambda-export a.zip -o json", "a.zip", Output::Json),
            ("lambda-export --output json", "aggregator.zip", Output::Json),
        ] {
            let cli = parsed(line).expect(line);
            assert_eq!(cli.globals.output, output, "{line}");
            assert!(
                format!("{:?}", cli.command).contains(&format!("\"{file}\"")),
                "{line}: {cli:?}"
            );
        }
        for line in ["list --output stacks.json", "lambda-export a.zip -o b.zip", "deploy -o x"] {
            assert!(parsed(line).is_err(), "{line}");
        }
    }
}
