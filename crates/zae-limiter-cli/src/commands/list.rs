//! `list`

use serde::Serialize;
use zae_limiter::Timestamp;
use zae_limiter::model::format_time;
use zae_limiter_infra::{Maker, StackState, tag};

use crate::columns::{Align, Cell, Columns};
use crate::context::Context;
use crate::exit::ExitStatus;
use crate::failure::Failure;
use crate::printer::Look;

use super::stack;

const AFTER_HELP: &str = "\
Examples:
  zae-limiter list --region eu-west-1
  zae-limiter list -o json | jq -r '.[].name'";

/// Arguments of `list`.
#[derive(clap::Args, Debug)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct Args {}

#[derive(Serialize)]
struct StackJson<'a> {
    name: &'a str,
    status: &'a str,
    version: Option<&'a str>,
    aggregator_version: Option<&'a str>,
    schema_version: Option<&'a str>,
    deployed_by: &'static str,
    created_at: Option<String>,
    updated_at: Option<String>,
}

pub(crate) async fn run(Args {}: Args, context: &mut Context) -> Result<ExitStatus, Failure> {
    let address = context.account()?;
    let account = stack::connect(context, &address).await?;
    context.printer.progress("listing the stacks of this account and region");
    let mut stacks = account.cloud.stacks().await?;
    stacks.sort_by(|a, b| a.name.cmp(&b.name));
    if context.printer.is_json() {
        context.printer.json(&stacks.iter().map(to_json).collect::<Vec<_>>());
        return Ok(ExitStatus::Done);
    }
    if stacks.is_empty() {
        context.printer.say("there are no stacks in this account and region");
        return Ok(ExitStatus::Done);
    }
    let left = ["name", "status", "version", "deployed by", "last change"];
    let mut columns = Columns::new(&left.map(|head| (head, Align::Left)));
    let rows: Vec<Vec<Cell>> = stacks.iter().map(row).collect();
    columns.print(&mut context.printer, &rows);
    Ok(ExitStatus::Done)
}

pub(super) fn look(state: &StackState) -> Look {
    match &state.status {
        status if status.is_good() => Look::Good,
        status if status.is_bad() => Look::Bad,
        _ => Look::Warn,
    }
}

fn row(state: &StackState) -> Vec<Cell> {
    let json = to_json(state);
    vec![
        Cell::from(json.name),
        Cell::new(look(state), json.status),
        Cell::from(json.version.unwrap_or("-")),
        Cell::from(json.deployed_by),
        Cell::from(json.updated_at.or(json.created_at).unwrap_or_else(|| "-".to_owned())),
    ]
}

fn to_json(state: &StackState) -> StackJson<'_> {
    let tag = |key: &str| state.tags.get(key).map(String::as_str);
    StackJson {
        name: &state.name,
        status: state.status.as_str(),
        version: tag(tag::VERSION),
        aggregator_version: tag(tag::AGGREGATOR_VERSION),
        schema_version: tag(tag::SCHEMA_VERSION),
        deployed_by: match state.maker() {
            Maker::Us => "zae-limiter",
            Maker::OurTemplate => "another tool, from our template (no tags)",
            Maker::Python => "the Python client",
            Maker::EarlyPython => "an early Python client (no tags)",
            Maker::Other => "another program",
        },
        created_at: time(state.created_at),
        updated_at: time(state.updated_at),
    }
}

pub(super) fn time(millis: Option<i64>) -> Option<String> {
    millis.map(|millis| format_time(Timestamp::from_millis(millis)))
}
