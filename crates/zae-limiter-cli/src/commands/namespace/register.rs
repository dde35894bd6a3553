//! `namespace register`

use zae_limiter::model::NamespaceName;

use crate::context::Context;
use crate::exit::ExitStatus;
use crate::failure::Failure;
use crate::grammar;

use super::NamespaceJson;

const AFTER_HELP: &str = "\
Examples:
  zae-limiter namespace register team-a
  zae-limiter namespace register team-a team-b

Registering a namespace again changes nothing. The namespace default always exists.";

/// Arguments of `namespace register`.
#[derive(clap::Args, Debug)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct Args {
    /// Names of the namespaces
    #[arg(required = true, value_name = "NAME", value_parser = grammar::namespace_name)]
    names: Vec<NamespaceName>,
}

pub(super) async fn run(args: Args, context: &mut Context) -> Result<ExitStatus, Failure> {
    let namespaces = context.default_limiter().await?.namespaces();
    let mut registered = Vec::with_capacity(args.names.len());
    for name in &args.names {
        let existing = namespaces.get(name.as_str()).await?;
        let namespace = namespaces.register(name.as_str()).await?;
        let id = &namespace.id;
        let words = match existing {
            Some(_) => format!("{name} is already registered, with the id {id}"),
            None => format!("registered {name}, with the id {id}"),
        };
        context.printer.say_unless_json(words);
        registered.push(NamespaceJson::from(namespace));
    }
    if context.printer.is_json() {
        context.printer.json(&registered);
    }
    Ok(ExitStatus::Done)
}
