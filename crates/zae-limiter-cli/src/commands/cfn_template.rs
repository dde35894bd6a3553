//! `cfn-template`

use std::path::PathBuf;

use zae_limiter_infra::{RetainTable, template};

use crate::context::Context;
use crate::exit::ExitStatus;
use crate::failure::Failure;

const AFTER_HELP: &str = "\
Examples:
  zae-limiter cfn-template > stack.yaml    or: zae-limiter cfn-template stack.yaml
  aws cloudformation deploy --template-file stack.yaml --stack-name my-app \\
      --capabilities CAPABILITY_NAMED_IAM --parameter-overrides EnableAggregator=false

With an aggregator, upload the zip file of `lambda-export` to S3, and pass its bucket and key as the
parameters AggregatorCodeBucket and AggregatorCodeKey.";

/// Arguments of `cfn-template`.
#[derive(clap::Args, Debug)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct Args {
    /// File to write [default: stdout]
    #[arg(value_name = "FILE")]
    file: Option<PathBuf>,

    /// Replace the file if it exists
    #[arg(short, long, requires = "file")]
    force: bool,

    /// Keep the table when the stack is deleted
    #[arg(long)]
    retain_table: bool,
}

pub(crate) fn run(args: Args, context: &mut Context) -> Result<ExitStatus, Failure> {
    let retain = if args.retain_table { RetainTable::Yes } else { RetainTable::No };
    let template = template(retain);
    if let Some(file) = &args.file {
        super::lambda_export::write(file, template.as_bytes(), args.force)?;
        let file = file.display().to_string();
        let words = format!("wrote {file}");
        context.printer.done(&serde_json::json!({ "file": file }), words);
        return Ok(ExitStatus::Done);
    }
    if context.printer.is_json() {
        context.printer.json(&serde_json::json!({ "template": template }));
    } else {
        context.printer.write(&template);
    }
    Ok(ExitStatus::Done)
}
