//! The environment variables that the program reads, each declared once.

/// An environment variable.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Var {
    /// What it is called.
    pub name: &'static str,
    /// What it does, for the reference.
    pub meaning: &'static str,
}

/// The address of the store, where `--store` does not give one.
pub(crate) const STORE: Var =
    Var { name: "ZAEL_STORE", meaning: "the address of the store, where --store gives none" };

/// The namespace, where `--namespace` does not give one.
pub(crate) const NAMESPACE: Var =
    Var { name: "ZAEL_NAMESPACE", meaning: "the namespace, where --namespace gives none" };

/// Who changes things, for the audit trail.
pub(crate) const PRINCIPAL: Var = Var {
    name: "ZAEL_PRINCIPAL",
    meaning: "who makes changes, for the audit trail (default: USER)",
};

/// Who is logged in: the principal, where nothing else is said.
pub(crate) const USER: Var =
    Var { name: "USER", meaning: "the principal, where ZAEL_PRINCIPAL is not set" };

/// Anything in it switches colours off, as in other programs (no-color.org).
pub(crate) const NO_COLOR: Var = Var { name: "NO_COLOR", meaning: "set to anything: no colours" };

/// Where programs are looked for: that of `local`.
pub(crate) const PATH: Var = Var { name: "PATH", meaning: "where `local` looks for its endpoint" };

/// The program behind `local`, instead of the one that is found.
pub(crate) const LOCAL: Var = Var {
    name: "ZAEL_LOCAL",
    meaning: "the program that `local` starts, instead of the one beside this or on the PATH",
};

/// All of them, for the reference.
pub(crate) const ALL: &[Var] = &[STORE, NAMESPACE, PRINCIPAL, USER, NO_COLOR, PATH, LOCAL];
