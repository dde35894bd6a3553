//! The guides from the folder `docs/` of the repository.
//!
//! Links between the guides work in the repository. Here, use the list of modules.

#![allow(rustdoc::broken_intra_doc_links, reason = "links between the guides are links to files")]

macro_rules! guides {
    ($($(#[$doc:meta])* $name:ident: $file:literal;)+) => {$(
        $(#[$doc])*
        ///
        #[doc = include_str!(concat!("../docs/", $file))]
        pub mod $name {}
    )+};
}

guides! {
    /// First steps.
    getting_started: "getting-started.md";
    /// Limits, bursts and refusals.
    limits_and_bursts: "limits-and-bursts.md";
    /// Estimates, and settling for the actual usage.
    llm_settling: "llm-settling.md";
    /// Hierarchies of keys, projects and organisations.
    hierarchies: "hierarchies.md";
    /// The levels at which limits are stored, and which one applies.
    configuration_levels: "configuration-levels.md";
    /// Several isolated limiters in one store.
    namespaces: "namespaces.md";
    /// What happens while the store is unavailable.
    unavailability: "unavailability.md";
    /// Wrong clocks, and what happens on each store.
    clocks: "clocks.md";
    /// How to choose a store.
    choosing_a_store: "choosing-a-store.md";
    /// The DynamoDB store: table, cost, permissions.
    dynamodb: "dynamodb.md";
    /// A limiter that deploys its own stack.
    ensure_stack: "ensure-stack.md";
    /// Programs without an async runtime.
    blocking: "blocking.md";
    /// A local table, and emulators of AWS.
    emulators: "emulators.md";
    /// Usage from the change stream.
    aggregator: "aggregator.md";
    /// Running it in production.
    operations: "operations.md";
}
