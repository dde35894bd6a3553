//! `check`

use zae_limiter_infra::records;
use zae_limiter_infra::versions::{Verdict, Versions};

use crate::columns::print_fields;
use crate::context::Context;
use crate::exit::ExitStatus;
use crate::failure::Failure;

use super::stack::{self, Found};
use super::status::{VersionsJson, unreadable, version_fields};

const AFTER_HELP: &str = "\
Examples:
  zae-limiter check --name my-app

Exit status: 0 this program can use the table, 1 it cannot, 4 there is no table.";

/// Arguments of `check`.
#[derive(clap::Args, Debug)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct Args {}

pub(crate) async fn run(Args {}: Args, context: &mut Context) -> Result<ExitStatus, Failure> {
    let address = context.stack()?;
    let account = stack::connect(context, &address).await?;
    let name = &address.table;
    context.printer.progress(format!("reading the versions of {name}"));
    let found = stack::find(&account, name).await?;
    if stack::figures(&account, name).await?.is_none() {
        let message = format!("there is no table {name}");
        return Err(stack::no_table(message, name, &found, "zae-limiter deploy creates one"));
    }
    let table = stack::table(context, &address).await?;
    let record = records::read_version(&table).await;
    let record = record.map_err(|error| unreadable(&address, &error))?;
    let versions = Versions::of(found.stack(), record.as_ref());
    let json = VersionsJson::from(&versions);
    if context.printer.is_json() {
        context.printer.json(&json);
    } else {
        let mut fields = version_fields(&json);
        if let Found::NoCloudFormation(error) = &found {
            fields.insert(1, stack::missing_field(error));
        }
        print_fields(&mut context.printer, fields);
        match versions.verdict() {
            Verdict::Current => {}
            Verdict::Behind(_) => context.printer.say("upgrade the stack: zae-limiter upgrade"),
            Verdict::NeedsMigration => {
                context.printer.say("migrate the table: zae-limiter upgrade");
            }
            Verdict::ProgramTooOld(_) => context.printer.say("upgrade this program"),
        }
    }
    let compatible = versions.verdict().is_compatible();
    Ok(if compatible { ExitStatus::Done } else { ExitStatus::Error })
}
