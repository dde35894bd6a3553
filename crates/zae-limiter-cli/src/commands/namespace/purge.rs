//! `namespace purge`

use serde::Serialize;
use zae_limiter::Error;
use zae_limiter::model::{NamespaceId, Object, format_time};

use crate::context::{Context, Yes};
use crate::exit::ExitStatus;
use crate::failure::Failure;
use crate::grammar;
use crate::printer::count;
use crate::stored::DeletedJson;

const AFTER_HELP: &str = "\
Examples:
  zae-limiter namespace orphans         shows the ids
  zae-limiter namespace purge ID
  zae-limiter namespace purge ID --yes  without asking

Delete a namespace before you purge it. Repeat an interrupted purge to complete it.";

/// Arguments of `namespace purge`.
#[derive(clap::Args, Debug)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct Args {
    /// Id of the namespace, as `namespace orphans` shows it
    #[arg(value_name = "ID", value_parser = grammar::namespace_id)]
    id: NamespaceId,

    #[command(flatten)]
    yes: Yes,
}

#[derive(Serialize)]
struct Purged {
    name: String,
    namespace_id: String,
    items: u64,
}

pub(super) async fn run(args: Args, context: &mut Context) -> Result<ExitStatus, Failure> {
    let namespaces = context.default_limiter().await?.namespaces();
    let id = &args.id;
    let Some(namespace) = namespaces.by_id(id).await? else {
        return Err(Error::NotFound(Object::NamespaceId(id.clone())).into());
    };
    let name = &namespace.name;
    // The library refuses to purge a namespace that is not deleted.
    if let Some(deleted_at) = namespace.deleted_at {
        let question = format!(
            "all entities, limits, balances, usage and audit records of namespace {name}, deleted \
             {}, will be removed permanently",
            format_time(deleted_at)
        );
        context.confirm(args.yes, &question).await?;
    }
    let printer = &mut context.printer;
    printer.progress(format!("purging {name}"));
    let progress = |items| printer.progress(format!("purging {name}: {}", count(items, "item")));
    let items = namespaces.purge(id, progress).await?;
    let deleted = Purged { name: name.to_string(), namespace_id: id.to_string(), items };
    printer.done(&DeletedJson { deleted }, format!("purged {name}: {}", count(items, "item")));
    Ok(ExitStatus::Done)
}
