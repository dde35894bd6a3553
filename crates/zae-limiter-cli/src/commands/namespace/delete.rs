//! `namespace delete` and `recover`

use zae_limiter::model::{NamespaceId, NamespaceName};

use crate::context::{Context, Yes};
use crate::exit::ExitStatus;
use crate::failure::Failure;
use crate::grammar;
use crate::stored::DeletedJson;

use super::NamespaceJson;

const AFTER_HELP: &str = "\
Examples:
  zae-limiter namespace delete team-a
  zae-limiter namespace orphans         shows its id
  zae-limiter namespace recover ID      undoes the deletion
  zae-limiter namespace purge ID        removes its items permanently

The name is free at once. Programs that already use the namespace continue to use it.";

const RECOVER_AFTER_HELP: &str = "\
Examples:
  zae-limiter namespace orphans         shows the ids
  zae-limiter namespace recover ID";

/// Arguments of `namespace delete`.
#[derive(clap::Args, Debug)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct Args {
    /// Namespace to delete
    #[arg(value_name = "NAME", value_parser = grammar::namespace_name)]
    name: NamespaceName,

    #[command(flatten)]
    yes: Yes,
}

/// Arguments of `namespace recover`.
#[derive(clap::Args, Debug)]
#[command(after_help = RECOVER_AFTER_HELP)]
pub(crate) struct RecoverArgs {
    /// Id of the namespace, as `namespace orphans` shows it
    #[arg(value_name = "ID", value_parser = grammar::namespace_id)]
    id: NamespaceId,
}

pub(super) async fn run(args: Args, context: &mut Context) -> Result<ExitStatus, Failure> {
    // The next command would register it again, and the deleted one could not be recovered.
    if args.name.as_str() == "default" {
        let failure = Failure::usage("the namespace default cannot be deleted");
        return Err(failure.hint("use another namespace: zae-limiter namespace register NAME"));
    }
    let limiter = context.default_limiter().await?;
    let namespaces = limiter.namespaces();
    if namespaces.get(args.name.as_str()).await?.is_some() {
        let question = format!(
            "namespace {} will be deleted; its items stay until they are purged",
            args.name
        );
        context.confirm(args.yes, &question).await?;
    }
    let namespace = namespaces.delete(args.name.as_str()).await?;
    let (name, id) = (&namespace.name, &namespace.id);
    let words = format!(
        "deleted {name}; recover it: zae-limiter namespace recover {id}\n\
         or remove its items permanently: zae-limiter namespace purge {id}"
    );
    context.printer.done(&DeletedJson { deleted: NamespaceJson::from(namespace) }, words);
    Ok(ExitStatus::Done)
}

pub(super) async fn recover(
    args: RecoverArgs,
    context: &mut Context,
) -> Result<ExitStatus, Failure> {
    let namespaces = context.default_limiter().await?.namespaces();
    let namespace = namespaces.recover(&args.id).await?;
    let words = format!("recovered {}", namespace.name);
    context.printer.done(&NamespaceJson::from(namespace), words);
    Ok(ExitStatus::Done)
}
